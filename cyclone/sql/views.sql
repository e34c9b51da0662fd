-- name: view_result
-- The state of one step with what it ended in. JSON as text: it is decoded by the step's own type.
SELECT state, output::text, error_kind, error FROM {schema}.cyclone_steps WHERE run_id = %(run_id)s AND node = %(node)s;

-- name: view_steps
-- The steps of a run, or one of its nodes; the columns are the fields of StepInfo, in their order. JSON travels as text, so
-- that no connection's own way of loading it matters.
SELECT s.run_id::text, s.node, s.kind, s.version, s.queue, s.priority, s.state, s.input::text, s.output::text,
       s.attempts, s.max_attempts, s.snoozes, s.reclaims, s.error_kind, s.error,
       (SELECT json_agg(json_build_object('attempt', e.attempt, 'at', e.at, 'kind', e.kind, 'message', e.message,
                                          'traceback', e.traceback) ORDER BY e.id)
        FROM {schema}.cyclone_errors e WHERE e.step = s.id)::text,
       s.last_crash, s.timeout_s, s.enqueued_at, s.ready_at, s.started_at, s.finished_at, s.due_at, s.tags, s.metadata::text, s.fate, s.unique_key
FROM {schema}.cyclone_steps s
WHERE s.run_id = %(run_id)s AND (%(node)s::text IS NULL OR s.node = %(node)s)
ORDER BY s.id;

-- name: view_events
-- A page of the recorded events beyond a place, as JSON, each row with how far the reading may go: below the oldest
-- transaction that is open no event can appear any more, and a page that is not full has come as far as that. The order is
-- that of the primary key. Without any event there is one row, with the bound alone.
SELECT bound.txid::text, row_to_json(e)::text
FROM (SELECT pg_snapshot_xmin(pg_current_snapshot()) AS txid) bound
LEFT JOIN LATERAL (
    SELECT * FROM {schema}.cyclone_events
    WHERE (txid, id) > (%(txid)s::xid8, %(id)s::bigint) AND txid < bound.txid AND kind = ANY(%(kinds)s::text[])
      AND (%(run_id)s::bigint IS NULL OR run_id = %(run_id)s::bigint)
    ORDER BY txid, id OFFSET %(skip)s::bigint LIMIT %(limit)s::bigint
) e ON true
ORDER BY e.txid, e.id;

-- name: view_lag
-- How many events a reader has before it.
SELECT count(*) FROM {schema}.cyclone_events
WHERE (txid, id) > (%(txid)s::xid8, %(id)s::bigint) AND txid < pg_snapshot_xmin(pg_current_snapshot())
  AND kind = ANY(%(kinds)s::text[]) AND (%(run_id)s::bigint IS NULL OR run_id = %(run_id)s::bigint);

-- name: view_history
-- The recorded events of one run, with those that a stream may not have yet.
SELECT row_to_json(e)::text FROM {schema}.cyclone_events e WHERE run_id = %(run_id)s::bigint ORDER BY txid, id;

-- name: view_run_result
-- How a run stands and what it gave. A map's result are the outputs of its items, which are kept once.
SELECT r.state, r.result_node, r.error_node, r.error_kind, r.error, s.state, s.fate,
       CASE WHEN r.state <> 'completed' THEN NULL WHEN s.kind = 'cyclone.map' THEN (
           SELECT coalesce(jsonb_agg(coalesce(i.output, 'null') ORDER BY i.id), '[]')
           FROM {schema}.cyclone_steps i WHERE i.map_step = s.id)::text
       ELSE s.output::text END
FROM {schema}.cyclone_runs r LEFT JOIN {schema}.cyclone_steps s ON s.run_id = r.id AND s.node = r.result_node
WHERE r.id = %(run_id)s::bigint;

-- name: view_run
-- One run, whether a workflow's or a standalone step; the columns are the fields of RunInfo, in their order.
SELECT r.id::text, 'workflow', r.workflow, g.version, r.submit_key, r.state, r.input::text, r.created_at, r.finished_at,
       r.deadline_at, r.result_node, CASE WHEN r.state <> 'completed' THEN r.error_node END,
       CASE WHEN r.state <> 'completed' THEN r.error_kind END, CASE WHEN r.state <> 'completed' THEN r.error END,
       -- Only a run that has met a failure is looked through for what was discarded.
       CASE WHEN r.error_kind IS NOT NULL THEN ARRAY(
           SELECT s.node FROM {schema}.cyclone_steps s WHERE s.run_id = r.id AND s.state = 'discarded' ORDER BY s.id) END,
       r.tags, r.metadata::text, extract(epoch FROM r.keep_for)::float8
FROM {schema}.cyclone_runs r LEFT JOIN {schema}.cyclone_graphs g ON g.id = r.graph
WHERE r.id = %(run_id)s::bigint
UNION ALL
SELECT s.id::text, 'step', s.kind, s.version, NULL,
       CASE s.state WHEN 'completed' THEN 'completed' WHEN 'discarded' THEN 'failed' WHEN 'cancelled' THEN 'cancelled' ELSE 'running' END,
       s.input::text, s.enqueued_at, s.finished_at, NULL, s.node,
       CASE WHEN s.state IN ('discarded', 'cancelled') THEN s.node END,
       CASE WHEN s.state IN ('discarded', 'cancelled') THEN s.error_kind END,
       CASE WHEN s.state IN ('discarded', 'cancelled') THEN s.error END,
       CASE WHEN s.state = 'discarded' THEN ARRAY[s.node] END, s.tags, s.metadata::text, extract(epoch FROM s.keep_for)::float8
FROM {schema}.cyclone_steps s WHERE s.id = %(run_id)s::bigint AND s.run_id = s.id;

-- name: view_runs
-- A page of the runs of workflows, newest first, below an id. A failed or cancelled one is found by its own index, the runs
-- of a workflow and the holder of a key by theirs; the columns are those of view_run.
SELECT r.id::text, 'workflow', r.workflow, g.version, r.submit_key, r.state, r.input::text, r.created_at, r.finished_at,
       r.deadline_at, r.result_node, CASE WHEN r.state <> 'completed' THEN r.error_node END,
       CASE WHEN r.state <> 'completed' THEN r.error_kind END, CASE WHEN r.state <> 'completed' THEN r.error END,
       CASE WHEN r.error_kind IS NOT NULL THEN ARRAY(
           SELECT s.node FROM {schema}.cyclone_steps s WHERE s.run_id = r.id AND s.state = 'discarded' ORDER BY s.id) END,
       r.tags, r.metadata::text, extract(epoch FROM r.keep_for)::float8
FROM {schema}.cyclone_runs r LEFT JOIN {schema}.cyclone_graphs g ON g.id = r.graph
WHERE (%(workflow)s::text IS NULL OR r.workflow = %(workflow)s::text)
  AND (%(state)s::text IS NULL OR r.state = %(state)s::text)
  AND (NOT %(early)s::boolean OR r.early_at IS NOT NULL)
  AND (%(key)s::text IS NULL OR r.submit_key = %(key)s::text)
  AND (%(tag)s::text IS NULL OR r.tags @> ARRAY[%(tag)s::text])
  AND (%(created_after)s::timestamptz IS NULL OR r.created_at >= %(created_after)s::timestamptz)
  AND (%(created_before)s::timestamptz IS NULL OR r.created_at < %(created_before)s::timestamptz)
  AND (%(ago_s)s::float8 IS NULL OR r.created_at >= now() - %(ago_s)s::float8 * interval '1 second')
  AND (%(after)s::bigint IS NULL OR r.id < %(after)s::bigint)
ORDER BY r.id DESC LIMIT %(limit)s::bigint;

-- name: view_graph
-- The graph of a run, for showing it.
SELECT g.spec::text FROM {schema}.cyclone_runs r JOIN {schema}.cyclone_graphs g ON g.id = r.graph WHERE r.id = %(run_id)s::bigint;
