-- Whether every listed worker is among those whose keys the caller declared (ARGV from `first` on).
local function all_declared(listed, first)
    local declared = {}
    for i = first, #ARGV do
        declared[ARGV[i]] = true
    end
    for _, worker in ipairs(listed) do
        if not declared[worker] then
            return false
        end
    end
    return true
end

-- Moves what each worker has open to lost:<epoch>:<worker>. KEYS from `first_key` on are pairs (rooms, lost), in
-- the order of the workers in ARGV from `first` on. One RENAME a worker, however many rooms. Answers pairs
-- worker, count of those who lost any.
local function snapshot(first_key, first, pending, epoch, ttl)
    local counts = {}
    for i = first, #ARGV do
        local rooms = KEYS[first_key + 2 * (i - first)]
        local lost = KEYS[first_key + 2 * (i - first) + 1]
        local n = redis.call('SCARD', rooms)
        if n > 0 then
            redis.call('HSET', pending, 'lost:' .. epoch .. ':' .. ARGV[i], n)
            redis.call('UNLINK', lost)
            redis.call('RENAME', rooms, lost)
            redis.call('PEXPIRE', lost, ttl)
            counts[#counts + 1] = ARGV[i]
            counts[#counts + 1] = tostring(n)
        end
    end
    if #counts > 0 then
        redis.call('PEXPIRE', pending, ttl)
    end
    return counts
end
