-- ARGV: 1 to drop everything, 0 to drop half of the stream and these snapshots; keys of snapshots ...
-- Needs no memory. The newest id of each name and the fenced ids stay. Routers find their workers unknown, and write
-- the workers' snapshots again.
for i = 2, #ARGV do redis.call('UNLINK', ARGV[i]) end
if ARGV[1] == '0' then
  redis.call('XTRIM', events, 'MAXLEN', math.floor(redis.call('XLEN', events) / 2))
else
  for _, id in ipairs(redis.pcall('HKEYS', workers)) do redis.call('UNLINK', workers .. ':' .. id) end
  redis.call('UNLINK', workers, numbers, leases, events)
end
return 0
