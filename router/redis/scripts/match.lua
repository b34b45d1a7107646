-- ARGV: keys (8 bytes each)
-- Returns id, number of first pages, id, number of first pages ... As in router/index/prefix_index.py, one page in 16
-- is read, then the pages between two with different holders.
local blob = ARGV[1]
local count = #blob / 8
local values = {}
local function read(positions)
  for start = 1, #positions, 1000 do
    local fields, stop = {}, math.min(#positions, start + 999)
    for i = start, stop do
      local position = positions[i]
      fields[#fields + 1] = string.sub(blob, 8 * position - 7, 8 * position)
    end
    if #fields > 0 then
      local found = redis.call('HMGET', pages, unpack(fields))
      for i = start, stop do values[positions[i]] = found[i - start + 1] end
    end
  end
end
local some, between = {}, {}
for position = 1, count, 16 do some[#some + 1] = position end
if count > 0 and some[#some] ~= count then some[#some + 1] = count end
read(some)
for i = 2, #some do
  if values[some[i - 1]] ~= values[some[i]] then
    for position = some[i - 1] + 1, some[i] - 1 do between[#between + 1] = position end
    if not values[some[i]] then break end
  end
end
read(between)
local holding, num_holding, found = nil, 0, {}
local before, depth = false, 0
local function holders(value)
  local set = {}
  for at = 1, #value, 4 do
    local a, b, c, d = string.byte(value, at, at + 3)
    set[math.floor((((a * 256 + b) * 256 + c) * 256 + d) / 2)] = true
  end
  return set
end
for position = 1, count do
  local value = values[position]
  if value == nil then value = before end
  if value ~= before or holding == nil then
    local set = value and holders(value) or {}
    if holding == nil then
      holding = set
      for _ in pairs(set) do num_holding = num_holding + 1 end
    else
      for number in pairs(holding) do
        if not set[number] then
          found[number] = depth
          holding[number] = nil
          num_holding = num_holding - 1
        end
      end
    end
    before = value
  end
  if num_holding == 0 then break end
  depth = position
end
for number in pairs(holding or {}) do found[number] = depth end
local result = {}
for number, length in pairs(found) do
  local id = redis.call('HGET', owners, number)
  if id and length > 0 then result[#result + 1] = id; result[#result + 1] = length end
end
return result
