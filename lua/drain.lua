--[[
PURPOSE: reads a snapshot (lost or orphans) in bounded pieces and lets go of it once it was acknowledged
USES: trail
KEYS: snapshot pending events
ARGV: verb cursor count field by linger_ms ttl_ms kept
RETURNS: ROOMS | ACKED | DROPPED
REPEAT: reading changes nothing; acknowledging or dropping again finds nothing left to change
COST: O(count) to read, O(1) otherwise (UNLINK frees in the background)
]]
-- verb: "read" answers ROOMS next_cursor "room room ..." ("0" ends; a room may come twice; one text, as a driver takes
-- 20 times longer for a list); "ack" answers ACKED and keeps
-- the snapshot readable for linger_ms; "drop" answers DROPPED.
local snapshot, pending, events = KEYS[1], KEYS[2], KEYS[3]
local verb, field, by, linger = ARGV[1], ARGV[4], ARGV[5], tonumber(ARGV[6])

if verb == 'read' then
    local page = redis.call('SSCAN', snapshot, ARGV[2], 'COUNT', ARGV[3])
    return {'ROOMS', page[1], table.concat(page[2], ' ')}
end
if verb == 'ack' and linger > 0 then
    if redis.call('PTTL', snapshot) > linger then
        redis.call('PEXPIRE', snapshot, ARGV[6])
    end
else
    redis.call('UNLINK', snapshot)
end
local count = redis.call('HGET', pending, field)
if count then
    redis.call('HDEL', pending, field)
    trail(events, ARGV[8], ARGV[7], 'kind', verb == 'ack' and 'acked' or 'dropped', 'snapshot', field, 'by', by, 'rooms', count)
end
return {verb == 'ack' and 'ACKED' or 'DROPPED'}
