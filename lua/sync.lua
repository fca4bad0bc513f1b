--[[
PURPOSE: applies one worker's batch for one address, renews its lease and answers all the worker must know back
USES: clock trail leases
KEYS: node workers rooms worker aborts suspects events
ARGV: worker batch mode epoch state failed_age_ms cause reason by instance lease_ms interval_ms ttl_ms kept count bootstrapping waiting_for_input transferring oldest claim tick_ms adds room...
RETURNS: OK | STALE | RESYNC | FENCED
REPEAT: a batch number is applied once; its repetition finds it applied, changes no room and answers the same, the granted turns included
COST: O(rooms in the batch + workers at the address)
]]
-- mode: "delta" needs batch-1 applied before; "reset" replaces the set (first piece of a full ledger).
-- The first `adds` rooms are added, the rest removed. `count` is what the set must hold afterwards.
-- claim: how many of its ticks ahead this worker takes a probe turn (0: none).
-- Every answer: status, epoch, state, failed_age_ms, cause, reason, by, instance, draining, turns, ms until the first
-- of them, watchers, {expired worker...}, {room, reason, ... aborted}.
local node, workers, rooms, record = KEYS[1], KEYS[2], KEYS[3], KEYS[4]
local aborts, suspects, events = KEYS[5], KEYS[6], KEYS[7]
local worker, batch, mode, epoch = ARGV[1], tonumber(ARGV[2]), ARGV[3], tonumber(ARGV[4])
local lease, interval, ttl, kept = tonumber(ARGV[11]), tonumber(ARGV[12]), ARGV[13], ARGV[14]
local claim, tick = tonumber(ARGV[20]), tonumber(ARGV[21])
local FIRST, adds = 23, tonumber(ARGV[22])
local now = server_ms()

local stored_epoch = tonumber(redis.call('HGET', node, 'epoch') or '')
local mine = redis.call('HMGET', record, 'batch', 'epoch', 'fenced', 'turns', 'turn_ms')
local stored_batch = tonumber(mine[1] or '')
local turns, turn = 0, 0 -- granted with this batch: how many, one interval apart, and when the first is

local function answer(status)
    local n = redis.call('HMGET', node, 'epoch', 'state', 'failed_ms', 'cause', 'reason', 'by', 'instance', 'draining')
    local age = n[3] and math.max(0, now - tonumber(n[3])) or -1 -- 0 if the clock stepped back: -1 means never
    local marks, cursor = {}, '0'
    if redis.call('EXISTS', aborts) == 1 then
        repeat -- one call may meet only what earlier batches emptied, and end before the marks that are left
            local page = redis.call('HSCAN', aborts, cursor, 'COUNT', '100')
            for _, word in ipairs(page[2]) do
                marks[#marks + 1] = word
            end
            cursor = page[1]
        until #marks >= 500 or cursor == '0'
    end
    return {status, n[1] or '0', n[2] or 'alive', text(age), n[4] or '', n[5] or '', n[6] or '', n[7] or '',
        n[8] or '0', text(turns), text(turns > 0 and turn - now or 0), tostring(redis.call('ZCOUNT', workers, text(now), '+inf')),
        redis.call('ZRANGEBYSCORE', workers, '-inf', '(' .. text(now), 'LIMIT', '0', '8'), marks}
end

local function renew(create)
    redis.call('PEXPIRE', node, ttl) -- frees the rest from the limit of a full store (OOM): see below
    forgive_stall(node, workers, now, lease)
    if create then
        redis.call('ZADD', workers, text(now + lease), worker)
    else
        redis.call('ZADD', workers, 'XX', text(now + lease), worker)
    end
    redis.call('HSET', node, 'seen_ms', text(now))
    for _, key in ipairs({node, workers, rooms, record, aborts, suspects, events}) do
        redis.call('PEXPIRE', key, ttl)
    end
end

if mine[3] then
    return answer('FENCED')
end

-- The store holds less than a living worker knows (emptied, or an older replica was promoted): move it forward.
if stored_epoch == nil or epoch > stored_epoch then
    local fresh = stored_epoch == nil and epoch <= 1
    stored_epoch = math.max(epoch, 1)
    redis.call('HSET', node, 'epoch', text(stored_epoch), 'state', ARGV[5])
    if tonumber(ARGV[6]) >= 0 then
        redis.call('HSET', node, 'failed_ms', text(now - tonumber(ARGV[6])), 'cause', ARGV[7], 'reason', ARGV[8], 'by', ARGV[9])
    end
    if ARGV[10] ~= '' then
        redis.call('HSET', node, 'instance', ARGV[10])
    end
    redis.call('DEL', suspects)
    if not fresh then
        trail(events, kept, ttl, 'kind', 'restored', 'epoch', text(stored_epoch), 'by', worker)
    end
end

-- Rooms of an ended epoch. What the set still holds is deleted, and what was marked, unless this worker has already
-- moved on: a mark must not meet the next opening of the same number.
if epoch > 0 and epoch < stored_epoch then
    if not mine[2] or tonumber(mine[2]) < stored_epoch then
        redis.call('UNLINK', rooms, aborts)
    end
    renew(false)
    return answer('STALE')
end

local state = redis.call('HGET', node, 'state')

local function settled()
    local short = state ~= 'failed' and redis.call('SCARD', rooms) ~= tonumber(ARGV[15])
    return answer(short and 'RESYNC' or 'OK')
end

if stored_batch == batch then
    turns, turn = tonumber(mine[4] or '0'), tonumber(mine[5] or '0')
    renew(false)
    return settled()
end
if (mode == 'delta' and stored_batch ~= batch - 1) or (stored_batch and stored_batch > batch) then
    renew(false)
    return answer('RESYNC')
end

if mode == 'reset' then
    redis.call('UNLINK', rooms)
end
-- A full store (OOM) refuses a script at its first growing write, and only there. So what frees memory or merely
-- renews comes first and carries the rest; a batch that only adds is refused as a whole.
if #ARGV >= FIRST + adds then
    redis.call('SREM', rooms, unpack(ARGV, FIRST + adds, #ARGV))
elseif adds == 0 then
    redis.call('PEXPIRE', node, ttl)
end
if adds > 0 and state ~= 'failed' then
    redis.call('SADD', rooms, unpack(ARGV, FIRST, FIRST + adds - 1))
end
if redis.call('EXISTS', aborts) == 1 and #ARGV >= FIRST and mode == 'delta' then
    -- A room that left, or was opened anew, is not the opening that the mark was meant for.
    redis.call('HDEL', aborts, unpack(ARGV, FIRST, #ARGV))
end

-- Turns are granted ahead of their time, so that they follow each other in exactly one interval whenever workers
-- come by; what was missed is not made up for. A worker that comes by less often takes all until it comes again.
local last = tonumber(redis.call('HGET', node, 'probe_ms') or '0')
local due = math.max(now, last <= now + lease and last + interval or 0) -- farther ahead: the clock stepped back
if claim > 0 and due <= now + claim * tick then
    turns, turn = 1 + math.max(0, math.floor((now + tick - due) / interval)), due
    redis.call('HSET', node, 'probe_ms', text(turn + (turns - 1) * interval))
end
if state == 'suspect' and redis.call('ZCOUNT', suspects, text(now), '+inf') == 0 then
    redis.call('HSET', node, 'state', 'alive')
    trail(events, kept, ttl, 'kind', 'cleared', 'epoch', text(stored_epoch), 'by', worker)
end
redis.call('HSET', record, 'batch', text(batch), 'epoch', text(stored_epoch), 'turns', text(turns), 'turn_ms', text(turn))
if ARGV[16] ~= '' then
    redis.call('HSET', record, 'bootstrapping', ARGV[16], 'waiting_for_input', ARGV[17], 'transferring', ARGV[18], 'oldest', ARGV[19])
end
renew(true)
return settled()
