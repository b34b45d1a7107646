-- ARGV: milliseconds of the leases, milliseconds that the namespace is kept, ids ...
-- Removes the workers whose leases have expired. Returns the ids of ARGV that are not there, or have no snapshot.
local now = now_ms()
local missing = {}
for i = 3, #ARGV do
  local id = ARGV[i]
  if redis.call('HEXISTS', workers, id) == 1 then redis.call('HSET', leases, id, now + tonumber(ARGV[1])) end
  if redis.call('HEXISTS', leases, id) + redis.call('PEXPIRE', workers .. ':' .. id, ARGV[2]) < 2 then
    missing[#missing + 1] = id
  end
end
for _, key in ipairs(KEYS) do redis.call('PEXPIRE', key, ARGV[2]) end
local all = redis.call('HGETALL', leases)
for i = 1, #all, 2 do
  if (tonumber(all[i + 1]) or 0) < now then remove_worker(all[i]) end
end
return missing
