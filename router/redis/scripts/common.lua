-- Prepended to each script, after a local for each key of the namespace.
local function now_ms()
  local time = redis.call('TIME')
  return tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000)
end
local function remove_worker(id)
  local number = redis.call('HGET', numbers, id)
  if number then redis.call('HDEL', owners, number) end
  for _, key in ipairs({workers, numbers, next_of, leases}) do redis.call('HDEL', key, id) end
end
