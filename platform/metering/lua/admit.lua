-- Take from several token buckets at once, or from none.
-- KEYS: the buckets, then the reservation's key.
-- ARGV: for each bucket its capacity (also its refill a minute) and what to take; then how many of
--       the buckets, from the first, the reservation covers; then its seconds to live.
-- Returns {taken (1 or 0), index of the bucket that refused, seconds to wait, level of each bucket}.
local time = redis.call('TIME')
local now = tonumber(time[1]) + tonumber(time[2]) / 1000000
local count = #KEYS - 1
local covered, ttl = tonumber(ARGV[2 * count + 1]), tonumber(ARGV[2 * count + 2])
local levels, refused, wait = {}, 0, 0

for i = 1, count do
  local capacity, cost = tonumber(ARGV[2 * i - 1]), tonumber(ARGV[2 * i])
  local bucket = redis.call('HMGET', KEYS[i], 'level', 'at', 'capacity')
  local level, at = tonumber(bucket[1] or capacity), tonumber(bucket[2] or now)
  -- A limit that was changed holds at once: what was used of it is kept, not what was left.
  level = level + capacity - tonumber(bucket[3] or capacity)
  -- A clock that was set back refills nothing, and counts from its new time on.
  local elapsed = math.max(0, now - at)
  level = math.min(capacity, level + elapsed * capacity / 60)
  levels[i] = level
  if level + 1e-6 < cost then
    local needed = (cost - level) * 60 / capacity
    if needed > wait then refused, wait = i, needed end
  end
end

local reply = { refused == 0 and 1 or 0, refused, tostring(wait) }
for i = 1, count do
  local capacity, cost = tonumber(ARGV[2 * i - 1]), tonumber(ARGV[2 * i])
  if refused == 0 then
    levels[i] = levels[i] - cost
    redis.call('HSET', KEYS[i], 'level', tostring(levels[i]), 'at', tostring(now),
      'capacity', tostring(capacity))
    redis.call('EXPIRE', KEYS[i], 60 + math.ceil((capacity - levels[i]) * 60 / capacity))
    if i <= covered then
      redis.call('HSET', KEYS[count + 1], KEYS[i], cost .. ' ' .. capacity)
    end
  end
  reply[3 + i] = tostring(levels[i])
end
if refused == 0 and covered > 0 then redis.call('EXPIRE', KEYS[count + 1], ttl) end
return reply
