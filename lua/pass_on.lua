--[[
PURPOSE: marks rooms that failed at one worker for its siblings to fail, as far as they have them open
USES: clock trail
KEYS: events (rooms aborts)...
ARGV: by ttl_ms kept channel address (room reason)...
RETURNS: OK
REPEAT: a mark is a field; the first reason stays, marking again changes nothing and answers the same
COST: O(rooms x siblings)
]]
-- OK [sibling's number from 1, room ... that were not open there]
local events = KEYS[1]
local by, ttl, kept, channel, address = ARGV[1], ARGV[2], ARGV[3], ARGV[4], ARGV[5]
local FIRST = 6
local unknown, marked = {}, 0

redis.call('PEXPIRE', events, ttl) -- frees the rest from the limit of a full store: what is marked will leave it
for sibling = 1, (#KEYS - 1) / 2 do
    local rooms, aborts = KEYS[2 * sibling], KEYS[2 * sibling + 1]
    for i = FIRST, #ARGV, 2 do
        if redis.call('SISMEMBER', rooms, ARGV[i]) == 0 then
            unknown[#unknown + 1] = tostring(sibling)
            unknown[#unknown + 1] = ARGV[i]
        elseif redis.call('HSETNX', aborts, ARGV[i], ARGV[i + 1]) == 1 then
            marked = marked + 1
        end
    end
    redis.call('PEXPIRE', aborts, ttl)
end
if marked > 0 then
    local rooms = tostring((#ARGV - FIRST + 1) / 2)
    trail(events, kept, ttl, 'kind', 'passed', 'by', by, 'rooms', rooms, 'reason', ARGV[FIRST + 1])
    redis.call('PUBLISH', channel, 'aborted ' .. address)
end
return {'OK', unknown}
