--[[
PURPOSE: marks one open room for its owner to fail
USES: clock trail
KEYS: rooms aborts events
ARGV: worker room reason by ttl_ms kept channel address
RETURNS: OK | UNKNOWN
REPEAT: the mark is a field; the first reason stays, marking again changes nothing
COST: O(1)
]]
local rooms, aborts, events = KEYS[1], KEYS[2], KEYS[3]
local worker, room, reason, by = ARGV[1], ARGV[2], ARGV[3], ARGV[4]
local ttl, kept, channel, address = ARGV[5], ARGV[6], ARGV[7], ARGV[8]

if redis.call('SISMEMBER', rooms, room) == 0 then
    return {'UNKNOWN'}
end
if redis.call('HSETNX', aborts, room, reason) == 1 then
    redis.call('PEXPIRE', aborts, ttl)
    trail(events, kept, ttl, 'kind', 'aborted', 'worker', worker, 'room', room, 'by', by, 'reason', reason)
    redis.call('PUBLISH', channel, 'aborted ' .. address)
end
return {'OK'}
