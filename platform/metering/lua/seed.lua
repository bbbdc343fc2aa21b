-- Fill a budget's counters from the ledger, unless they are there or something was settled since.
-- KEYS: the counters, the spool's stream, all counters of the budget with their time zones.
-- ARGV: 1 the spool's last id when the ledger was read, 2 tokens, 3 nanos, 4 an epoch, 5 when to
--       forget it, 6 seconds that it stays at least; 7 requests that run and count, as JSON:
--       [[the gateway's open requests, id, reservation, prompt tokens, output tokens at most, picos
--       of a prompt token, of an output token, nanos of its media], ...]; 8 seconds that a reservation lives; 9 the
--       tenant's time zone.
-- Returns 1 when the counters are there, 0 when the ledger must be read again.
if redis.call('EXISTS', KEYS[1]) == 1 then return 1 end
local last = '0-0'
if redis.call('EXISTS', KEYS[2]) == 1 then
  local info = redis.call('XINFO', 'STREAM', KEYS[2])
  for i = 1, #info, 2 do
    if info[i] == 'last-generated-id' then last = info[i + 1] end
  end
end
if last ~= ARGV[1] then return 0 end

-- What requests hold that were let in without this counter. Those that have ended are in the ledger.
local held_tokens, held_nanos = 0, 0
for _, request in ipairs(cjson.decode(ARGV[7])) do
  local open, id, reservation, prompt, output = unpack(request, 1, 5)
  if redis.call('HEXISTS', open, id) == 1 then
    output = tonumber(redis.call('HGET', reservation, 'granted') or output)
    local nanos = math.ceil((prompt * request[6] + output * request[7]) / 1000) + request[8]
    held_tokens, held_nanos = held_tokens + prompt + output, held_nanos + nanos
    redis.call('HSET', reservation, KEYS[1], string.format('budget %d %.0f', prompt + output, nanos))
    redis.call('EXPIRE', reservation, ARGV[8])
  end
end
redis.call('HSET', KEYS[1], 'tokens', ARGV[2], 'nanos', ARGV[3],
  'held_tokens', string.format('%.0f', held_tokens), 'held_nanos', string.format('%.0f', held_nanos),
  'epoch', ARGV[4])
-- By this clock, whatever those say who ask: a counter that ended at once would be filled for ever.
local now = tonumber(redis.call('TIME')[1])
redis.call('EXPIREAT', KEYS[1], string.format('%.0f', math.max(tonumber(ARGV[5]), now + ARGV[6])))

-- Counters by another time zone's clocks are told nothing from now on. Should it come back, they are
-- filled anew.
local known = redis.call('HGETALL', KEYS[3])
for i = 1, #known, 2 do
  if known[i + 1] ~= ARGV[9] then redis.call('DEL', known[i]) end
  if redis.call('EXISTS', known[i]) == 0 then redis.call('HDEL', KEYS[3], known[i]) end
end
redis.call('HSET', KEYS[3], KEYS[1], ARGV[9])
redis.call('EXPIRE', KEYS[3], 100 * 86400)
return 1
