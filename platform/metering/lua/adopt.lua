-- Go on with a request that another gateway let in.
-- KEYS: open requests of that gateway, open requests of this one, who has taken the request over.
-- ARGV: the request's id, what to bill should this gateway die, this gateway, seconds to remember.
-- Returns 1, or 0 when the other gateway has settled it, or somebody in its place.
if redis.call('HDEL', KEYS[1], ARGV[1]) == 0 then return 0 end
redis.call('HSET', KEYS[2], ARGV[1], ARGV[2])
redis.call('SET', KEYS[3], ARGV[3], 'EX', ARGV[4])
return 1
