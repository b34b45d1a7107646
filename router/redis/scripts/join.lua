-- ARGV: id, name, incarnation, description, milliseconds of the lease
-- Of two lives of one name, the earlier is fenced; of equal incarnations, the one that joins last is the later. A worker
-- that has left Redis fences no other, even with a higher incarnation: its clock may have been ahead.
-- Returns the number of the worker's next event; -1: unknown, -2: the worker is fenced.
local id, name, incarnation = ARGV[1], ARGV[2], tonumber(ARGV[3])
if redis.call('ZSCORE', fenced, id) then return -2 end
local born, former = string.match(redis.call('HGET', names, name) or '', '^(%d+) (.+)$')
if former and former ~= id then
  local is_late = tonumber(born) > incarnation and redis.call('HEXISTS', workers, former) == 1
  fence(is_late and id or former)
  if is_late then return -2 end
end
redis.call('HSET', names, name, ARGV[3] .. ' ' .. id)
redis.call('HSET', workers, id, ARGV[4])
redis.call('HSET', leases, id, now_ms() + tonumber(ARGV[5]))
return tonumber(redis.call('HGET', numbers, id) or '-1') or -1
