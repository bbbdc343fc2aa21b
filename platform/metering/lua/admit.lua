-- Take from all limits of a request at once, or from none.
-- KEYS: the token buckets, the sets of running requests, the budgets' counters; then the
--       reservation, and the gateway's open requests.
-- ARGV: 1 the request as JSON:
--         id; buckets: [[capacity (also its refill a minute), what to take], ...]; num_token_buckets: how
--         many of them, from the first, the reservation corrects; sets: [most at a time, ...];
--         budgets: [[tokens (-1: no limit), nanos (-1), seconds when the period ends], ...];
--         prompt, output: tokens; min_output: fewer output tokens are no use; picos: [of a prompt token,
--         of an output token]; media: nanos of its images and audio; partial: whether less than `output` may be given though others may
--         soon give back what they reserved; ttl: seconds that the reservation lives
--       2 what to bill should the gateway die.
-- Returns {what, index, seconds to wait, output tokens that may be generated, level of each bucket,
-- epoch of each budget's counter} with what: "ok"; "bucket", "set" or "budget" that refused; "wait" for a budget that others hold;
-- "unknown" for a counter that isn't there.
local request = cjson.decode(ARGV[1])
local time = redis.call('TIME')
local now = tonumber(time[1]) + tonumber(time[2]) / 1000000
local buckets, sets, budgets = request.buckets, request.sets, request.budgets
local reservation, open = KEYS[#KEYS - 1], KEYS[#KEYS]
local levels, epochs = {}, {}

local function reply(what, index, wait, granted)
  local words = { what, index, tostring(wait), granted }
  for i = 1, #buckets do words[4 + i] = tostring(levels[i]) end
  for i = 1, #epochs do words[4 + #buckets + i] = epochs[i] end
  return words
end

-- Asked again by a gateway whose connection broke before it had the answer: it was let in.
local before = redis.call('HGET', reservation, 'granted')
if before then
  for i = 1, #buckets do
    levels[i] = redis.call('HGET', KEYS[i], 'level') or buckets[i][1]
  end
  for i = 1, #budgets do
    epochs[i] = redis.call('HGET', KEYS[#buckets + #sets + i], 'epoch') or ''
  end
  return reply('ok', 0, 0, tonumber(before))
end

-- Budgets first: a counter that isn't there must be filled before anything is decided.
local granted, refused, held = request.output, 0, false
for i = 1, #budgets do
  local name = KEYS[#buckets + #sets + i]
  local counter =
    redis.call('HMGET', name, 'tokens', 'nanos', 'held_tokens', 'held_nanos', 'epoch')
  if not counter[1] then
    for j = 1, #buckets do levels[j] = 0 end
    epochs = {}
    return reply('unknown', i, 0, 0)
  end
  epochs[i] = counter[5]
  local tokens, nanos = tonumber(counter[1]), tonumber(counter[2])
  local held_tokens, held_nanos = tonumber(counter[3]), tonumber(counter[4])
  local limit = request.output
  if budgets[i][1] >= 0 then
    limit = math.min(limit, budgets[i][1] - tokens - held_tokens - request.prompt)
  end
  if budgets[i][2] >= 0 then
    -- Beyond 9e12 nanos (9,000 of the currency) a double would lose picos; no request takes more.
    local left = math.min(budgets[i][2] - nanos - held_nanos - request.media, 9e12) * 1000
    local rest = left - request.prompt * request.picos[1]
    if rest < 0 then
      limit = math.min(limit, -1)
    elseif request.picos[2] > 0 then
      limit = math.min(limit, math.floor(rest / request.picos[2]))
    end
  end
  if limit < granted then
    granted, refused = limit, i
    held = held_tokens > 0 or held_nanos > 0
  end
end

local over, wait = 0, 0
for i = 1, #buckets do
  local capacity, cost = buckets[i][1], buckets[i][2]
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
    if needed > wait then over, wait = i, needed end
  end
end

if refused > 0 and held and not request.partial then return reply('wait', refused, 0, 0) end
if granted < request.min_output then
  return reply('budget', refused, budgets[refused][3] - now, math.max(0, granted))
end
for i = 1, #sets do
  if redis.call('SCARD', KEYS[#buckets + i]) >= sets[i] then return reply('set', i, 0, 0) end
end
if over > 0 then return reply('bucket', over, wait, 0) end

local taken = {}
for i = 1, #buckets do
  local capacity, cost = buckets[i][1], buckets[i][2]
  levels[i] = levels[i] - cost
  redis.call('HSET', KEYS[i], 'level', tostring(levels[i]), 'at', tostring(now),
    'capacity', tostring(capacity))
  redis.call('EXPIRE', KEYS[i], 60 + math.ceil((capacity - levels[i]) * 60 / capacity))
  if i <= request.num_token_buckets then
    taken[#taken + 1] = KEYS[i]
    taken[#taken + 1] = cost .. ' ' .. capacity
  end
end
for i = 1, #sets do
  local name = KEYS[#buckets + i]
  redis.call('SADD', name, request.id)
  redis.call('EXPIRE', name, request.ttl)
  taken[#taken + 1] = name
  taken[#taken + 1] = 'set'
end
local nanos = math.ceil((request.prompt * request.picos[1] + granted * request.picos[2]) / 1000)
  + request.media
for i = 1, #budgets do
  local name = KEYS[#buckets + #sets + i]
  redis.call('HINCRBY', name, 'held_tokens', request.prompt + granted)
  redis.call('HINCRBY', name, 'held_nanos', string.format('%.0f', nanos))
  taken[#taken + 1] = name
  taken[#taken + 1] = string.format('budget %d %.0f', request.prompt + granted, nanos)
end
redis.call('HSET', reservation, 'granted', granted, unpack(taken))
redis.call('EXPIRE', reservation, request.ttl)
redis.call('HSET', open, request.id, ARGV[2])
return reply('ok', 0, 0, granted)
