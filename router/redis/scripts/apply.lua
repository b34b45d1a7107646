-- ARGV: id, router, first number, is_afresh, tier, keys (8 bytes each), is_stored (a byte each), message, most
-- entries of the stream, most pages
-- Returns 1 when done, 0 when known before, -1 for an unknown worker, -2 when earlier events are missing.
local id, first, tier = ARGV[1], tonumber(ARGV[3]), tonumber(ARGV[5])
local blob, is_stored = ARGV[6], ARGV[7]
local count = #is_stored
local number = redis.call('HGET', numbers, id)
if not number then return -1 end
if ARGV[4] == '1' then
  redis.call('HDEL', owners, number)
  number = redis.call('INCR', counter)
  redis.call('HSET', numbers, id, number)
  redis.call('HSET', owners, number, id)
else
  local expected = tonumber(redis.call('HGET', next_of, id) or '0') or 0
  if first + count <= expected and count > 0 then return 0 end
  if first ~= expected then return -2 end
end
local mark = struct.pack('>I4', 2 * number + tier)
local room = tonumber(ARGV[10]) - redis.call('HLEN', pages)
for start = 1, count, 1000 do
  local fields = {}
  for i = start, math.min(count, start + 999) do fields[#fields + 1] = string.sub(blob, 8 * i - 7, 8 * i) end
  local values = redis.call('HMGET', pages, unpack(fields))
  local now_held, gone, latest = {}, {}, {}
  for i, field in ipairs(fields) do
    local old = latest[field]
    if old == nil then old = values[i] or '' end
    local new = old
    local at = 1
    while at <= #old and string.sub(old, at, at + 3) ~= mark do at = at + 4 end
    if string.byte(is_stored, start + i - 1) == 1 then
      if at > #old and (#old > 0 or room > 0) then
        if #old == 0 then room = room - 1 end
        new = old .. mark
      end
    elseif at <= #old then
      new = string.sub(old, 1, at - 1) .. string.sub(old, at + 4)
    end
    latest[field] = new
  end
  for field, value in pairs(latest) do
    if value == '' then gone[#gone + 1] = field
    else now_held[#now_held + 1] = field; now_held[#now_held + 1] = value end
  end
  if #now_held > 0 then redis.call('HSET', pages, unpack(now_held)) end
  if #gone > 0 then redis.call('HDEL', pages, unpack(gone)) end
end
redis.call('HSET', next_of, id, first + count)
redis.call('XADD', events, 'MAXLEN', '~', ARGV[9], '*', 'r', ARGV[2], 'w', id, 'p', ARGV[8])
return 1
