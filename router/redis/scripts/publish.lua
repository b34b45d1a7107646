-- ARGV: id, router, first number, number of pages, is_restart, message, most entries of the stream
-- is_restart '1': the numbers may continue anywhere. Returns 1 when published, 0 when published before, -1 for an
-- unknown worker, -2 when earlier events are missing.
local id, first, count = ARGV[1], tonumber(ARGV[3]), tonumber(ARGV[4])
if redis.call('HEXISTS', workers, id) == 0 then return -1 end
if ARGV[5] == '0' then
  local expected = tonumber(redis.call('HGET', numbers, id) or '0') or 0
  if first < expected and first + count <= expected then return 0 end
  if first ~= expected then return -2 end
end
redis.call('XADD', events, 'MAXLEN', '~', ARGV[7], '*', 'r', ARGV[2], 'w', id, 'p', ARGV[6])
redis.call('HSET', numbers, id, first + count)
return 1
