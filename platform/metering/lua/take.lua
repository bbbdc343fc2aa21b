-- Take from all of these token buckets, or from none; `admit` does so for what generates.
-- KEYS: the buckets. ARGV: what to take, then the capacity (also its refill a minute) of each.
-- Returns {the bucket that refused (0: none), seconds until it has enough}.
local time = redis.call('TIME')
local now = tonumber(time[1]) + tonumber(time[2]) / 1000000
local levels, over, wait = {}, 0, 0
for i = 1, #KEYS do
  local capacity = tonumber(ARGV[i + 1])
  local bucket = redis.call('HMGET', KEYS[i], 'level', 'at')
  local level, at = tonumber(bucket[1] or capacity), tonumber(bucket[2] or now)
  -- A clock that was set back refills nothing, and counts from its new time on.
  level = math.min(capacity, level + math.max(0, now - at) * capacity / 60)
  levels[i] = level
  local needed = (math.min(capacity, tonumber(ARGV[1])) - level) * 60 / capacity
  if needed > 1e-6 and needed > wait then over, wait = i, needed end
end
if over > 0 then return { over, tostring(wait) } end
for i = 1, #KEYS do
  local capacity = tonumber(ARGV[i + 1])
  local level = levels[i] - math.min(capacity, tonumber(ARGV[1]))
  redis.call('HSET', KEYS[i], 'level', tostring(level), 'at', tostring(now))
  redis.call('EXPIRE', KEYS[i], 60 + math.ceil((capacity - level) * 60 / capacity))
end
return { 0, '0' }
