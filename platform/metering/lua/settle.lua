-- Spool a usage record and give back what its reservation took too much, once.
-- KEYS: the reservation, the spool's stream, the gateway's open requests, who has taken the request
--       over: then that one settles it; what the engine wrote of open requests, its sums, since when.
-- ARGV: tokens really used, the record, the spool's most entries, the request's id, nanos that it
--       cost, the budgets' counters as JSON {name: epoch} as they were when it was admitted,
--       the gateway, and the account as JSON, '' for none: see `metering.accounts`.
local taker = redis.call('GET', KEYS[4])
if taker and taker ~= ARGV[7] then
  redis.call('HDEL', KEYS[3], ARGV[4])
  return -1
end
local time = redis.call('TIME')
local now = tonumber(time[1]) + tonumber(time[2]) / 1000000
local reserved = redis.call('HGETALL', KEYS[1])
local tokens, nanos = tonumber(ARGV[1]), ARGV[5]

local function refill(name, cost)
  local bucket = redis.call('HMGET', name, 'level', 'at', 'capacity')
  local capacity = tonumber(bucket[3]) -- as it is today
  if not capacity then return end -- full again, and gone
  local level, at = tonumber(bucket[1] or capacity), tonumber(bucket[2] or now)
  level = math.min(capacity, level + math.max(0, now - at) * capacity / 60)
  -- More used than reserved: the bucket goes into debt, and later requests wait for it.
  level = math.min(capacity, level + cost - tokens)
  redis.call('HSET', name, 'level', tostring(level), 'at', tostring(now),
    'capacity', tostring(capacity))
  redis.call('EXPIRE', name, 60 + math.ceil((capacity - level) * 60 / capacity))
end

local function spend(name)
  redis.call('HINCRBY', name, 'tokens', ARGV[1])
  redis.call('HINCRBY', name, 'nanos', nanos)
end

local function give_back(name, field, amount)
  if amount ~= '0' then redis.call('HINCRBY', name, field, '-' .. amount) end
end

for i = 1, #reserved, 2 do
  local name, what = reserved[i], reserved[i + 1]
  local held_tokens, held_nanos = string.match(what, '^budget (%S+) (%S+)$')
  if name == 'granted' then
    -- how many output tokens might come; what they cost stands beside it
  elseif what == 'set' then
    redis.call('SREM', name, ARGV[4])
  elseif held_tokens then
    if redis.call('EXISTS', name) == 1 then
      give_back(name, 'held_tokens', held_tokens)
      give_back(name, 'held_nanos', held_nanos)
      spend(name)
    end
  else
    local cost, capacity = string.match(what, '^(%S+) (%S+)$')
    if redis.call('HEXISTS', name, 'capacity') == 0 then
      redis.call('HSET', name, 'level', capacity, 'at', tostring(now), 'capacity', capacity)
    end
    refill(name, tonumber(cost))
  end
end

-- The reservation went with a Redis that lost its data, and the counters were filled anew since,
-- from a ledger without this request.
local anew = {}
for name, epoch in pairs(cjson.decode(ARGV[6])) do
  local today = redis.call('HGET', name, 'epoch')
  if today and today ~= epoch then anew[#anew + 1] = name end
end
if #anew > 0 and redis.call('SET', KEYS[1] .. ':lost', 1, 'NX', 'EX', 86400) and #reserved == 0 then
  for i = 1, #anew do spend(anew[i]) end
end
-- What the engine wrote, as against what is billed. Once: a second try finds the mark.
local function sum_of(fields)
  local sum = 0
  for i = 1, #fields do
    sum = sum + tonumber(redis.call('HGET', KEYS[5], fields[i]) or 0)
    redis.call('HDEL', KEYS[5], fields[i])
  end
  return sum
end

local function close(account)
  local written = { sum_of(account.prompts), sum_of(account.outputs) }
  redis.call('SET', KEYS[7], math.floor(now), 'NX')
  if account.started < tonumber(redis.call('GET', KEYS[7])) then return end
  local billed = { account.prompt, account.output }
  for i = 1, 2 do
    -- What a gateway that died had settled already was written then, and closed.
    local fresh = math.max(0, written[i] - account.before[i])
    redis.call('HINCRBY', KEYS[6], account.sums[2 * i - 1], fresh)
    if not account.whole and fresh > billed[i] then
      redis.call('HINCRBY', KEYS[6], account.sums[2 * i], fresh - billed[i])
    end
  end
end

if ARGV[8] ~= '' and redis.call('SET', KEYS[1] .. ':closed', 1, 'NX', 'EX', 600) then
  close(cjson.decode(ARGV[8]))
end
redis.call('DEL', KEYS[1])
redis.call('HDEL', KEYS[3], ARGV[4])
redis.call('XADD', KEYS[2], 'MAXLEN', '~', ARGV[3], '*', 'r', ARGV[2])
return #reserved / 2
