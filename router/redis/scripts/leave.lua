-- ARGV: id
-- The name stays, so that the worker's next life fences this one.
remove_worker(ARGV[1])
return 0
