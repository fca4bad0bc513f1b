-- Nobody synced the address for more than a third of a lease: the store was away, not the workers. Every lease
-- gets a fresh term instead of being judged by time that nobody could use. Answers whether that was so.
local function forgive_stall(node, workers, now, lease)
    local seen = tonumber(redis.call('HGET', node, 'seen_ms') or '')
    local stalled = seen ~= nil and now - seen > lease / 3
    if stalled then
        for _, worker in ipairs(redis.call('ZRANGE', workers, '0', '-1')) do
            if tonumber(redis.call('ZSCORE', workers, worker)) < now + lease then
                redis.call('ZADD', workers, text(now + lease), worker)
            end
        end
    end
    return stalled
end
