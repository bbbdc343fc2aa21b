-- Spool a usage record and give back what its reservation took too much, once.
-- KEYS: the reservation, the spool's stream.
-- ARGV: tokens really used, the record, the spool's most entries.
local time = redis.call('TIME')
local now = tonumber(time[1]) + tonumber(time[2]) / 1000000
local reserved = redis.call('HGETALL', KEYS[1])

for i = 1, #reserved, 2 do
  local cost, capacity = string.match(reserved[i + 1], '^(%S+) (%S+)$')
  cost, capacity = tonumber(cost), tonumber(capacity)
  local bucket = redis.call('HMGET', reserved[i], 'level', 'at', 'capacity')
  capacity = tonumber(bucket[3] or capacity) -- as it is today
  local level, at = tonumber(bucket[1] or capacity), tonumber(bucket[2] or now)
  level = math.min(capacity, level + math.max(0, now - at) * capacity / 60)
  -- More used than reserved: the bucket goes into debt, and later requests wait for it.
  level = math.min(capacity, level + cost - tonumber(ARGV[1]))
  redis.call('HSET', reserved[i], 'level', tostring(level), 'at', tostring(now),
    'capacity', tostring(capacity))
  redis.call('EXPIRE', reserved[i], 60 + math.ceil((capacity - level) * 60 / capacity))
end
redis.call('DEL', KEYS[1])
redis.call('XADD', KEYS[2], 'MAXLEN', '~', ARGV[3], '*', 'r', ARGV[2])
return #reserved / 2
