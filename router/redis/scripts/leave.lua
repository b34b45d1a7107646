-- ARGV: id
local name
local said = redis.call('HGETALL', names)
for i = 1, #said, 2 do if said[i + 1] == ARGV[1] then name = said[i] end end
if name then redis.call('HDEL', names, name) end
remove_worker(ARGV[1])
return 0
