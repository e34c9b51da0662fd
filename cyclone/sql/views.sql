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
       s.last_crash, s.timeout_s, s.enqueued_at, s.ready_at, s.started_at, s.finished_at, s.due_at, s.tags, s.metadata::text
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
