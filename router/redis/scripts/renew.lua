-- ARGV: milliseconds of the leases, milliseconds that the namespace is kept, ids ...
-- Returns the ids of workers whose leases have expired, which are removed, and those of ARGV that are not there.
local now = now_ms()
local dead, missing = {}, {}
for i = 3, #ARGV do
  if redis.call('HEXISTS', workers, ARGV[i]) == 1 then
    redis.call('HSET', leases, ARGV[i], now + tonumber(ARGV[1]))
  else
    missing[#missing + 1] = ARGV[i]
  end
end
for _, key in ipairs(KEYS) do redis.call('PEXPIRE', key, ARGV[2]) end
local all = redis.call('HGETALL', leases)
for i = 1, #all, 2 do
  if (tonumber(all[i + 1]) or 0) < now then dead[#dead + 1] = all[i]; remove_worker(all[i]) end
end
return {dead, missing}
