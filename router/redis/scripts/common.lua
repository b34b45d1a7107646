-- Prepended to each script, after a local for each key of the namespace.
local function now_ms()
  local time = redis.call('TIME')
  return tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000)
end
local function remove_worker(id)
  for _, key in ipairs({workers, numbers, leases}) do redis.call('HDEL', key, id) end
end
