-- Say that a gateway is alive, and learn which are not.
-- KEYS: the gateways by their last beat. ARGV: this gateway, seconds of silence that mean death.
-- Returns the dead ones.
local time = redis.call('TIME')
local now = tonumber(time[1]) + tonumber(time[2]) / 1000000
-- After the clock was set back, what a gateway said last lies ahead: its silence begins now.
for _, name in ipairs(redis.call('ZRANGEBYSCORE', KEYS[1], '(' .. now, '+inf')) do
    redis.call('ZADD', KEYS[1], now, name)
end
-- Nobody was heard for long: Redis stood still, its clock was put forward, or a primary took over
-- whose clock is ahead. That is no silence of theirs.
local newest = redis.call('ZREVRANGE', KEYS[1], 0, 0, 'WITHSCORES')
local unheard = newest[2] and now - tonumber(newest[2]) or 0
if unheard > ARGV[2] / 2 then
    for _, name in ipairs(redis.call('ZRANGE', KEYS[1], 0, -1)) do
        redis.call('ZINCRBY', KEYS[1], unheard, name)
    end
end
redis.call('ZADD', KEYS[1], now, ARGV[1])
return redis.call('ZRANGEBYSCORE', KEYS[1], '-inf', now - ARGV[2])
