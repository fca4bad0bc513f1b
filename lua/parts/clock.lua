-- The server's clock in whole milliseconds, and its exact text (a double prints as 1.79e+12).
local function server_ms()
    local t = redis.call('TIME')
    return tonumber(t[1]) * 1000 + math.floor(tonumber(t[2]) / 1000)
end

local function text(n)
    return string.format('%.0f', n)
end
