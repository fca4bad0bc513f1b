--[[
PURPOSE: ends the address's epoch for everybody, moving all its rooms to snapshots in one step
USES: clock trail epoch
KEYS: node workers suspects pending events (rooms lost)...
ARGV: epoch call by reason ttl_ms kept channel address worker...
RETURNS: FAILED | STALE | RETRY
REPEAT: the verdict is stored under its call id with its counts; the same call answers the same, any other finds the epoch moved
COST: O(workers at the address), whatever the number of rooms
]]
-- FAILED epoch {worker, count, ...} | STALE epoch state failed_age_ms cause reason by | RETRY {worker...}
local node, workers, suspects, pending, events = KEYS[1], KEYS[2], KEYS[3], KEYS[4], KEYS[5]
local epoch, call, by, reason = tonumber(ARGV[1]), ARGV[2], ARGV[3], ARGV[4]
local ttl, kept, channel, address = ARGV[5], ARGV[6], ARGV[7], ARGV[8]
local FIRST = 9
local now = server_ms()

local n = redis.call('HMGET', node, 'epoch', 'state', 'verdict', 'verdict_counts', 'failed_ms', 'cause', 'reason', 'by')
local stored = tonumber(n[1] or '0')
if n[3] == call and stored == epoch + 1 then
    local counts = {}
    for word in string.gmatch(n[4], '%S+') do
        counts[#counts + 1] = word
    end
    return {'FAILED', text(stored), counts}
end
if stored ~= epoch or n[2] == 'failed' then
    local age = n[5] and math.max(0, now - tonumber(n[5])) or -1
    return {'STALE', text(stored), n[2] or 'alive', text(age), n[6] or '', n[7] or '', n[8] or ''}
end
local listed = redis.call('ZRANGE', workers, '0', '-1')
if not all_declared(listed, FIRST) then
    return {'RETRY', listed}
end

-- PEXPIRE first: once a script has written, a full store (OOM) no longer refuses the rest of it.
redis.call('PEXPIRE', node, ttl)
local counts = snapshot(6, FIRST, pending, ARGV[1], ttl)
redis.call('HSET', node, 'epoch', text(epoch + 1), 'state', 'failed', 'failed_ms', text(now), 'cause', 'node_failed',
    'reason', reason, 'by', by, 'verdict', call, 'verdict_counts', table.concat(counts, ' '))
redis.call('PEXPIRE', node, ttl) -- again: an address that nobody used has no hash until now
redis.call('DEL', suspects)
local total = 0
for i = 2, #counts, 2 do
    total = total + tonumber(counts[i])
end
trail(events, kept, ttl, 'kind', 'failed', 'epoch', ARGV[1], 'by', by, 'reason', reason, 'rooms', tostring(total))
redis.call('PUBLISH', channel, 'failed ' .. address)
return {'FAILED', text(epoch + 1), counts}
