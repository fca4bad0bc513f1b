--[[
PURPOSE: keeps the index of addresses: marks the caller's as used now, drops old ones, answers those nobody used lately
USES: clock
KEYS: addresses
ARGV: ttl_ms stale_ms address...
RETURNS: OK
REPEAT: a mark is a score that only moves forward in time
COST: O(addresses given + 64)
]]
-- OK {address...}: at most 64 that nobody marked for stale_ms; whoever is left listed there must be reaped by somebody.
local now = server_ms()
local ttl, stale = tonumber(ARGV[1]), tonumber(ARGV[2])
-- First what frees memory: a full store (OOM) refuses a script at its first growing write, and only there.
redis.call('ZREMRANGEBYSCORE', KEYS[1], '-inf', '(' .. text(now - ttl))
for i = 3, #ARGV do
    redis.call('ZADD', KEYS[1], text(now), ARGV[i])
end
redis.call('PEXPIRE', KEYS[1], text(ttl))
-- More than a page: another one every second, so that none of them stays unseen behind the oldest.
local unused = redis.call('ZCOUNT', KEYS[1], '-inf', text(now - stale))
local first = unused > 64 and (math.floor(now / 1000) * 64) % unused or 0
return {'OK', redis.call('ZRANGEBYSCORE', KEYS[1], '-inf', text(now - stale), 'LIMIT', text(first), '64')}
