-- One entry in an address's audit trail. `kept` bounds the stream, `ttl` its life after the last entry.
local function trail(events, kept, ttl, ...)
    redis.call('XADD', events, 'MAXLEN', '~', kept, '*', ...)
    redis.call('PEXPIRE', events, ttl)
end
