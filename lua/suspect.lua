--[[
PURPOSE: records or withdraws one worker's vote that the node is dead in this epoch
USES: clock trail
KEYS: node workers suspects events
ARGV: worker epoch vote reason window_ms votes majority ttl_ms kept channel address
RETURNS: VOTES | STALE
REPEAT: a vote is a member of a sorted set with its own deadline: the same vote again only renews it
COST: O(votes)
]]
-- vote 1 or 0; majority 1 asks for more than half of the watchers, as the voter doubts itself.
-- VOTES votes needed watchers | STALE epoch state
local node, workers, suspects, events = KEYS[1], KEYS[2], KEYS[3], KEYS[4]
local worker, epoch, vote, reason = ARGV[1], tonumber(ARGV[2]), ARGV[3], ARGV[4]
local ttl, kept, channel, address = ARGV[8], ARGV[9], ARGV[10], ARGV[11]
local now = server_ms()

local n = redis.call('HMGET', node, 'epoch', 'state')
if tonumber(n[1] or '0') ~= epoch or n[2] == 'failed' or not redis.call('ZSCORE', workers, worker) then
    return {'STALE', n[1] or '0', n[2] or 'alive'}
end

redis.call('ZREMRANGEBYSCORE', suspects, '-inf', '(' .. text(now))
for _, voter in ipairs(redis.call('ZRANGE', suspects, '0', '-1')) do
    if not redis.call('ZSCORE', workers, voter) then
        redis.call('ZREM', suspects, voter)
    end
end
if vote == '1' then
    local first = redis.call('ZADD', suspects, text(now + tonumber(ARGV[5])), worker)
    redis.call('PEXPIRE', suspects, ttl)
    if first == 1 then
        redis.call('HSET', node, 'state', 'suspect')
        trail(events, kept, ttl, 'kind', 'vote', 'epoch', ARGV[2], 'by', worker, 'reason', reason)
        redis.call('PUBLISH', channel, 'suspect ' .. address)
    end
else
    redis.call('ZREM', suspects, worker)
    if n[2] == 'suspect' and redis.call('ZCARD', suspects) == 0 then
        redis.call('HSET', node, 'state', 'alive')
        trail(events, kept, ttl, 'kind', 'cleared', 'epoch', ARGV[2], 'by', worker)
    end
end

local watchers = redis.call('ZCOUNT', workers, text(now), '+inf')
local needed = math.max(1, math.min(tonumber(ARGV[6]), watchers))
if ARGV[7] == '1' then
    needed = math.max(needed, math.floor(watchers / 2) + 1)
end
return {'VOTES', tostring(redis.call('ZCARD', suspects)), tostring(needed), tostring(watchers)}
