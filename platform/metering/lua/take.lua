-- Take from all of these token buckets, or from none; `admit` does so for what generates.
-- KEYS: the buckets. ARGV: "all", or "debt" to take more than there is; then of each bucket what to
-- take and the capacity (also its refill a minute). To take 0 is refused by a bucket in debt.
-- Returns {the bucket that refused (0: none), seconds until it has enough}.
local time = redis.call('TIME')
local now = tonumber(time[1]) + tonumber(time[2]) / 1000000
local levels, over, wait = {}, 0, 0
for i = 1, #KEYS do
  local amount, capacity = tonumber(ARGV[2 * i]), tonumber(ARGV[2 * i + 1])
  local bucket = redis.call('HMGET', KEYS[i], 'level', 'at', 'capacity')
  local level, at = tonumber(bucket[1] or capacity), tonumber(bucket[2] or now)
  -- A limit that was changed holds at once: what was used of it is kept, not what was left.
  level = level + capacity - tonumber(bucket[3] or capacity)
  -- A clock that was set back refills nothing, and counts from its new time on.
  levels[i] = math.min(capacity, level + math.max(0, now - at) * capacity / 60)
  local needed = (amount - levels[i]) * 60 / capacity
  if needed > 1e-6 and needed > wait then over, wait = i, needed end
end
if over > 0 and ARGV[1] == 'all' then return { over, tostring(wait) } end
for i = 1, #KEYS do
  local amount, capacity = tonumber(ARGV[2 * i]), tonumber(ARGV[2 * i + 1])
  local level = levels[i] - amount
  redis.call('HSET', KEYS[i], 'level', tostring(level), 'at', tostring(now),
    'capacity', tostring(capacity))
  redis.call('EXPIRE', KEYS[i], 60 + math.ceil((capacity - level) * 60 / capacity))
end
return { 0, '0' }
