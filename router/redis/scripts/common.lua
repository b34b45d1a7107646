-- Prepended to each script, after a local for each key of the namespace.
local function now_ms()
  local time = redis.call('TIME')
  return tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000)
end
local function remove_worker(id)
  for _, key in ipairs({workers, numbers, leases}) do redis.call('HDEL', key, id) end
  redis.call('UNLINK', workers .. ':' .. id)
end
local function fence(id)
  remove_worker(id)
  redis.call('ZADD', fenced, now_ms(), id)
  redis.call('ZREMRANGEBYRANK', fenced, 0, -4097)
end
