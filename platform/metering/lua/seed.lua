-- Fill a budget's counters from the ledger, unless they are there or something was settled since.
-- KEYS: the counters, the spool's stream.
-- ARGV: the spool's last id when the ledger was read, tokens, nanos, an epoch, when to forget it.
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
redis.call('HSET', KEYS[1], 'tokens', ARGV[2], 'nanos', ARGV[3], 'held_tokens', 0, 'held_nanos', 0,
  'epoch', ARGV[4])
redis.call('EXPIREAT', KEYS[1], ARGV[5])
return 1
