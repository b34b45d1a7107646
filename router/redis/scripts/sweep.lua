-- ARGV: cursor, number of pages to look at
-- Removes holders without an owner. Returns the next cursor.
local seen = redis.call('HSCAN', pages, ARGV[1], 'COUNT', ARGV[2])
local is_alive = {}
for i = 1, #seen[2], 2 do
  local value, kept = seen[2][i + 1], {}
  for at = 1, #value, 4 do
    local number = math.floor(struct.unpack('>I4', value, at) / 2)
    if is_alive[number] == nil then is_alive[number] = redis.call('HEXISTS', owners, number) == 1 end
    if is_alive[number] then kept[#kept + 1] = string.sub(value, at, at + 3) end
  end
  local left = table.concat(kept)
  if left == '' then redis.call('HDEL', pages, seen[2][i])
  elseif #left < #value then redis.call('HSET', pages, seen[2][i], left) end
end
return seen[1]
