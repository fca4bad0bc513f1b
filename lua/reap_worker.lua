--[[
PURPOSE: takes a worker off an address (its lease has run out, or it leaves by itself) and keeps its open rooms for the node
USES: clock trail leases
KEYS: node workers rooms worker aborts suspects pending orphans events
ARGV: worker leaving by reason lease_ms ttl_ms kept channel address
RETURNS: REAPED | ALIVE | UNKNOWN
REPEAT: the worker's record becomes a fence that holds the count; reaping it again answers the same
COST: O(1): one RENAME, whatever the number of rooms
]]
-- REAPED count | ALIVE left_ms | UNKNOWN (never listed here). The fence refuses every later batch of that id.
local node, workers, rooms, record, aborts = KEYS[1], KEYS[2], KEYS[3], KEYS[4], KEYS[5]
local suspects, pending, orphans, events = KEYS[6], KEYS[7], KEYS[8], KEYS[9]
local worker, leaving, by, reason, lease = ARGV[1], ARGV[2], ARGV[3], ARGV[4], tonumber(ARGV[5])
local ttl, kept, channel, address = ARGV[6], ARGV[7], ARGV[8], ARGV[9]
local now = server_ms()

local fenced = redis.call('HGET', record, 'fenced')
if fenced then
    return {'REAPED', fenced}
end
local deadline = tonumber(redis.call('ZSCORE', workers, worker) or '')
if leaving ~= '1' then
    if deadline == nil then
        return {'UNKNOWN'}
    end
    redis.call('PEXPIRE', node, ttl) -- a full store (OOM) refuses a script at its first growing write, and only there
    local stalled = forgive_stall(node, workers, now, lease)
    if redis.call('EXISTS', node) == 1 then
        redis.call('HSET', node, 'seen_ms', text(now))
    end
    if stalled or deadline >= now then
        return {'ALIVE', text(math.max(0, tonumber(redis.call('ZSCORE', workers, worker)) - now))}
    end
end

redis.call('ZREM', workers, worker)
redis.call('ZREM', suspects, worker)
redis.call('UNLINK', aborts, record)
local n = redis.call('SCARD', rooms)
if n > 0 then
    redis.call('UNLINK', orphans)
    redis.call('RENAME', rooms, orphans)
    redis.call('PEXPIRE', orphans, ttl)
    redis.call('HSET', pending, 'orphans:' .. worker, n)
    redis.call('PEXPIRE', pending, ttl)
end
redis.call('HSET', record, 'fenced', n)
redis.call('PEXPIRE', record, ttl)
trail(events, kept, ttl, 'kind', leaving == '1' and 'left' or 'reaped', 'worker', worker, 'by', by, 'reason', reason, 'rooms', tostring(n))
redis.call('PUBLISH', channel, 'reaped ' .. address)
return {'REAPED', tostring(n)}
