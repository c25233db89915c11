-- One request again and again: its content is in the file BODY, its headers in HEADERS as "Name: value" lines.
local function content(name)
  local file = assert(io.open(os.getenv(name), "rb"))
  local text = file:read("*a")
  file:close()
  return text
end
wrk.method = "POST"
wrk.body = content("BODY")
for name, value in content("HEADERS"):gmatch("([^:\n]+): ([^\n]+)") do
  wrk.headers[name] = value
end
