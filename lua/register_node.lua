--[[
PURPOSE: a node announces itself, or a probe reports what answered; another instance than the stored one ends the epoch
USES: clock trail leases epoch
KEYS: node workers suspects pending events (rooms lost)...
ARGV: how instance info draining epoch call by lease_ms ttl_ms kept channel address worker...
RETURNS: SAME | NEW | REPLACED | PAST | STALE | RETRY
REPEAT: the instance is stored, and what the last change answered under its call id, so the same call changes nothing and answers the same
COST: O(workers at the address), whatever the number of rooms
]]
-- how: "start" (a node begins), "renew" (it goes on), "probe" (a worker read an answer; instance may be empty).
-- A failed address is revived by "start", by another instance, and by a probe that began in this very epoch;
-- not by "renew": that a node can write to the store does not say that workers can reach it.
-- draining: 1, 0 or empty (leave as it is). An instance that was replaced before never comes back: PAST.
-- A probe whose epoch has ended says nothing about this one: STALE.
-- SAME | NEW | REPLACED | PAST | STALE: epoch state draining {worker, count... lost} {pending field, count...} {expired worker...}
-- RETRY epoch {worker...}
local node, workers, suspects, pending, events = KEYS[1], KEYS[2], KEYS[3], KEYS[4], KEYS[5]
local how, instance, info, draining = ARGV[1], ARGV[2], ARGV[3], ARGV[4]
local epoch, call, by, lease = tonumber(ARGV[5]), ARGV[6], ARGV[7], tonumber(ARGV[8])
local ttl, kept, channel, address = ARGV[9], ARGV[10], ARGV[11], ARGV[12]
local FIRST = 13
local now = server_ms()

local n = redis.call('HMGET', node, 'epoch', 'state', 'instance', 'past', 'verdict', 'verdict_counts', 'register_call', 'register_answer')
local stored, state, known, past = tonumber(n[1] or '0'), n[2] or 'alive', n[3] or '', n[4] or ''
local counts = {}

local function answer(status)
    local waiting = {}
    if how ~= 'probe' then
        -- A page a call, turning: a large hash is seen as a whole within some ticks.
        local from = redis.call('HGET', node, 'pending_cursor') or '0'
        local page = redis.call('HSCAN', pending, from, 'COUNT', '100')
        waiting = page[2]
        if page[1] ~= from then
            redis.call('HSET', node, 'pending_cursor', page[1])
        end
    end
    local now_is = redis.call('HMGET', node, 'epoch', 'state', 'draining')
    return {status, now_is[1] or '0', now_is[2] or 'alive', now_is[3] or '0', counts, waiting,
        redis.call('ZRANGEBYSCORE', workers, '-inf', '(' .. text(now), 'LIMIT', '0', '8')}
end

local function keep()
    if how ~= 'probe' then
        forgive_stall(node, workers, now, lease)
        redis.call('HSET', node, 'seen_ms', text(now), 'announced_ms', text(now), 'info', info)
        if draining ~= '' then
            redis.call('HSET', node, 'draining', draining)
        end
    end
    for _, key in ipairs({node, workers, events}) do
        redis.call('PEXPIRE', key, ttl)
    end
end

local function revive(why)
    redis.call('HSET', node, 'state', 'alive')
    redis.call('DEL', suspects)
    trail(events, kept, ttl, 'kind', 'revived', 'epoch', text(stored), 'by', by, 'reason', why)
    redis.call('PUBLISH', channel, 'revived ' .. address)
end

if n[7] == call then
    for word in string.gmatch(n[5] == call and n[6] or '', '%S+') do
        counts[#counts + 1] = word
    end
    return answer(n[8])
end
if string.find(' ' .. past .. ' ', ' ' .. instance .. ' ', 1, true) and instance ~= '' then
    return answer('PAST')
end
if how == 'probe' and epoch ~= stored then
    return answer('STALE')
end
if stored == 0 then
    if how == 'probe' then
        return answer('STALE')
    end
    stored, state = 1, 'alive'
    redis.call('HSET', node, 'epoch', '1', 'state', 'alive')
end

redis.call('PEXPIRE', node, ttl) -- a full store (OOM) refuses a script at its first growing write, and only there
if instance == '' or instance == known then
    if state == 'failed' and how ~= 'renew' then
        revive('it answers again')
    end
    keep()
    return answer('SAME')
end

if known ~= '' and state ~= 'failed' then
    local listed = redis.call('ZRANGE', workers, '0', '-1')
    if epoch ~= stored or not all_declared(listed, FIRST) then
        return {'RETRY', text(stored), listed}
    end
    counts = snapshot(6, FIRST, pending, text(stored), ttl)
    local reason = 'instance ' .. known .. ' was replaced by ' .. instance
    redis.call('HSET', node, 'epoch', text(stored + 1), 'state', 'alive', 'failed_ms', text(now), 'cause', 'node_restarted',
        'reason', reason, 'by', by, 'verdict', call, 'verdict_counts', table.concat(counts, ' '))
    redis.call('DEL', suspects)
end

if known ~= '' then
    local kept_past = {}
    for word in string.gmatch(past, '%S+') do
        kept_past[#kept_past + 1] = word
    end
    kept_past[#kept_past + 1] = known
    redis.call('HSET', node, 'past', table.concat(kept_past, ' ', math.max(1, #kept_past - 7)), 'draining', '0')
end
local outcome = (known == '' or state == 'failed') and 'NEW' or 'REPLACED'
redis.call('HSET', node, 'instance', instance, 'register_call', call, 'register_answer', outcome)
if state == 'failed' then
    revive('instance ' .. instance .. ' answers')
elseif known ~= '' then
    trail(events, kept, ttl, 'kind', 'replaced', 'epoch', text(stored), 'by', by, 'reason', 'instance ' .. instance)
    redis.call('PUBLISH', channel, 'replaced ' .. address)
else
    trail(events, kept, ttl, 'kind', 'registered', 'epoch', text(stored), 'by', by, 'reason', 'instance ' .. instance)
    redis.call('PUBLISH', channel, 'registered ' .. address)
end
keep()
return answer(outcome)
