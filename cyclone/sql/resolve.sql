-- name: load_graphs
SELECT id, spec::text FROM {schema}.cyclone_graphs WHERE id = ANY(%(ids)b::bigint[]);

-- name: load_inputs
-- The inputs of runs.
SELECT id, input FROM {schema}.cyclone_runs WHERE id = ANY(%(runs)b::bigint[]);

-- name: load_outputs
-- What nodes of runs have given; null for one that gave nothing. A map gives the outputs of its items, in the order of the
-- list: they are kept once, with the items.
SELECT w.n, CASE WHEN p.state <> 'completed' THEN NULL WHEN p.kind = 'cyclone.map' THEN (
           SELECT coalesce(jsonb_agg(coalesce(i.output, 'null') ORDER BY i.id), '[]')
           FROM {schema}.cyclone_steps i WHERE i.map_step = p.id)
       ELSE p.output END
FROM unnest(%(runs)b::bigint[], %(nodes)b::text[]) WITH ORDINALITY AS w(run, node, n)
JOIN {schema}.cyclone_steps p ON p.run_id = w.run AND p.node = w.node AND p.run_id = ANY(%(runs)b::bigint[]);

-- name: load_failures
-- Which of these nodes did not complete, and why: for those that run all the same.
SELECT w.n, p.attempts, p.finished_at, coalesce(p.error_kind, 'cancelled'), coalesce(p.error, ''),
       coalesce((SELECT e.traceback FROM {schema}.cyclone_errors e WHERE e.step = p.id ORDER BY e.id DESC LIMIT 1), '')
FROM unnest(%(runs)b::bigint[], %(nodes)b::text[]) WITH ORDINALITY AS w(run, node, n)
JOIN {schema}.cyclone_steps p ON p.run_id = w.run AND p.node = w.node AND p.run_id = ANY(%(runs)b::bigint[])
WHERE p.state = 'discarded' OR p.state = 'cancelled' AND p.fate <> 'skipped'
ORDER BY w.n;
