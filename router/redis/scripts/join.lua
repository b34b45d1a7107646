-- ARGV: id, name, description, milliseconds of the lease
-- Returns the number of the worker's next event; -1: unknown, -2: the worker is fenced.
local id, name = ARGV[1], ARGV[2]
if redis.call('ZSCORE', fenced, id) then return -2 end
local former = redis.call('HGET', names, name)
if former and former ~= id then
  remove_worker(former)
  redis.call('ZADD', fenced, now_ms(), former)
  redis.call('ZREMRANGEBYRANK', fenced, 0, -4097)
end
redis.call('HSET', names, name, id)
redis.call('HSET', workers, id, ARGV[3])
redis.call('HSET', leases, id, now_ms() + tonumber(ARGV[4]))
return tonumber(redis.call('HGET', numbers, id) or '-1') or -1
