-- name: lock_run
-- The run of a workflow, before any of its steps. None: there is none, or the run is a standalone step.
SELECT state, coalesce(ending, ''), result_node, deadline_at <= coalesce(%(now)s::timestamptz, now())
FROM {schema}.cyclone_runs WHERE id = %(run_id)s FOR UPDATE;

-- name: cancel_run
-- Ends a locked run, with up to 1,000 of its steps at once.
SELECT {schema}.cyclone_end_run(
    %(run_id)s::bigint, 'cancel', NULL, 'cancelled', %(reason)s::text, coalesce(%(actor)s::text, session_user), %(host)s::text,
    coalesce(%(now)s::timestamptz, clock_timestamp()))::integer;

-- name: end_round
-- A further round of ending what is left of a run. How many it ended; fewer than 1,000: it is over.
SELECT {schema}.cyclone_end_steps(%(run_id)s::bigint, 1000, coalesce(%(now)s::timestamptz, clock_timestamp()));

-- name: lock_nodes
-- All nodes of a locked run, by id: parents before their children, and the items of maps last.
SELECT id, node, state, coalesce(fate, ''), policy, accept_skipped, contained, sink, map_step, coalesce(children, '{}'),
       (SELECT g.max_parallel FROM {schema}.cyclone_graph_nodes g WHERE g.graph = s.graph AND g.pos = s.pos AND g.map)
FROM {schema}.cyclone_steps s WHERE run_id = %(run_id)s ORDER BY id FOR UPDATE;

-- name: restore_nodes
-- What a reopening means for the other nodes of a locked run, and for the run.
WITH clock AS MATERIALIZED (
    SELECT at, coalesce(%(deadline_at)s::timestamptz, at + %(deadline_s)s::float8 * interval '1 second') AS deadline_at
    FROM coalesce(%(now)s::timestamptz, clock_timestamp()) AS at
), sent AS MATERIALIZED (
    SELECT * FROM unnest(%(ids)s::bigint[], %(states)s::text[], %(pending)s::integer[], %(fates)s::text[], %(sinks)s::boolean[],
                         %(nexts)s::bigint[])
           AS d(id, state, pending, fate, sink, map_next)
), moved AS (
    UPDATE {schema}.cyclone_steps s
    SET state = d.state, pending = d.pending, fate = nullif(d.fate, ''), sink = d.sink,
        map_next = coalesce(d.map_next, s.map_next), deadline_at = coalesce(clock.deadline_at, s.deadline_at),
        ord = CASE WHEN d.state = 'available' AND s.state <> 'available' THEN nextval('{schema}.cyclone_ids') ELSE s.ord END,
        ready_at = CASE WHEN d.state = 'available' AND s.state <> 'available' THEN clock.at ELSE s.ready_at END,
        finished_at = CASE WHEN d.state IN ('completed', 'cancelled', 'discarded') THEN coalesce(s.finished_at, clock.at) END,
        error_kind = CASE WHEN d.state = 'cancelled' THEN s.error_kind END,
        error = CASE WHEN d.state = 'cancelled' THEN s.error END
    FROM sent d, clock WHERE s.id = d.id AND s.id = ANY(%(ids)s::bigint[])
    RETURNING s.id, s.queue, s.isolated, s.priority, s.ord, d.state, s.ready_at = clock.at AS fresh
), tickets AS (
    INSERT INTO {schema}.cyclone_ready (lane, rank, ord, step)
    SELECT CASE WHEN isolated THEN '!' || queue ELSE queue END, priority * 2 + 1, ord, id
    FROM moved WHERE state = 'available' AND fresh ORDER BY id
), reopened AS (
    UPDATE {schema}.cyclone_runs r
    SET state = 'running', finished_at = NULL, early_at = NULL, open_sinks = %(open_sinks)s, lost = %(lost)s,
        deadline_at = coalesce(clock.deadline_at, r.deadline_at), due_at = coalesce(clock.deadline_at, r.deadline_at),
        error_node = CASE WHEN %(lost)s THEN error_node END, error_kind = CASE WHEN %(lost)s THEN error_kind END,
        error = CASE WHEN %(lost)s THEN error END
    FROM clock WHERE r.id = %(run_id)s
    RETURNING r.id, r.deadline_at
), told AS (
    UPDATE {schema}.cyclone_steps s SET deadline_at = r.deadline_at FROM reopened r
    WHERE s.run_id = r.id AND s.deadline_at IS DISTINCT FROM r.deadline_at AND NOT EXISTS (SELECT FROM sent d WHERE d.id = s.id)
)
SELECT count(*) FROM moved;

-- name: lock_items
SELECT id FROM {schema}.cyclone_steps WHERE map_step = %(id)s ORDER BY id FOR UPDATE;

-- name: nodes_failed
SELECT {schema}.cyclone_nodes_failed(
    ARRAY[%(id)s::bigint], ARRAY[%(run_id)s::bigint], %(host)s::text, coalesce(%(now)s::timestamptz, clock_timestamp()));

-- name: lock_step
-- Locked in a statement of its own: one that waited for the lock sees the step's newest version, but no row that was
-- inserted meanwhile, and the claim that an order is looked up by may be such a row.
SELECT id, state, (kind = 'cyclone.map')::integer FROM {schema}.cyclone_steps WHERE run_id = %(run_id)s AND (node = %(node)s OR %(node)s::text IS NULL AND id = run_id) FOR UPDATE;

-- name: cancel_step
-- Ends a locked step that is not terminal, and with a map its items. A running handler is told by an order to the life that
-- has it; its outcome is refused from now on, for the step is no longer running. The ticket stays, and the claim that meets it
-- finds it stale. Answers with one event for each, or with nothing when the step had ended already.
WITH old AS MATERIALIZED (
    SELECT id, state = 'running' AS running FROM {schema}.cyclone_steps WHERE id = %(id)s OR map_step = %(id)s
), ended AS (
    UPDATE {schema}.cyclone_steps
    SET state = 'cancelled', finished_at = coalesce(%(now)s::timestamptz, now()), due_at = NULL, error_kind = 'cancelled',
        error = %(reason)s::text, fate = CASE WHEN graph IS NOT NULL THEN 'alone' END, key_held = false
    WHERE (id = %(id)s OR map_step = %(id)s) AND state IN ('pending', 'scheduled', 'available', 'running', 'waiting')
    RETURNING id, run_id, node, kind, queue, attempts, claim
), ordered AS (
    INSERT INTO {schema}.cyclone_orders (life, step, claim, reason, ordered_at)
    SELECT c.life, e.id, e.claim, %(reason)s::text, coalesce(%(now)s::timestamptz, now())
    FROM ended e JOIN old o ON o.id = e.id AND o.running JOIN {schema}.cyclone_claims c ON c.id = e.claim
), events AS (
    INSERT INTO {schema}.cyclone_events (at, kind, step, run_id, node, step_kind, queue, attempt, actor, host, detail)
    SELECT coalesce(%(now)s::timestamptz, now()), 'cancelled', id, run_id, node, kind, queue, attempts,
           coalesce(%(actor)s::text, session_user), %(host)s::text, jsonb_build_object('reason', %(reason)s::text)
    FROM ended
    RETURNING *
)
SELECT row_to_json(e)::text FROM events e ORDER BY e.step;

-- name: lock_discarded
-- The discarded steps of a run, by id. One that is no longer discarded once its lock is there is left out. Whoever finds
-- none is told by `known` whether there is such a run at all.
WITH found AS MATERIALIZED (
    SELECT id FROM {schema}.cyclone_steps WHERE run_id = %(run_id)s AND state = 'discarded' ORDER BY id FOR UPDATE
)
SELECT array(SELECT id FROM found ORDER BY id), EXISTS (SELECT FROM {schema}.cyclone_steps WHERE run_id = %(run_id)s) AS known;

-- name: taken_keys
-- Who has the unique keys of steps that are to be reopened.
SELECT o.id::text, s.kind, s.unique_key FROM {schema}.cyclone_steps s
JOIN {schema}.cyclone_steps o ON o.kind = s.kind AND o.unique_key = s.unique_key AND o.key_held AND o.id <> s.id
WHERE s.id = ANY(%(ids)s::bigint[]) AND s.unique_key IS NOT NULL ORDER BY s.id;

-- name: reopen_steps
-- Makes locked, discarded steps available again: the same rows under new tickets. The execution that discarded a step counts
-- as a failed one, so the next claim takes the next number, and so many more are allowed. Deaths and snoozes are counted anew
-- and the step is no longer run alone: whatever it was, the operator believes that it is over. The list of errors stays.
--
-- Answers with one event per step, and whether somebody sleeps who should be told after the commit. In the transaction of a
-- caller (%(notify)s) the notification is part of it, as when enqueueing.
WITH clock AS MATERIALIZED (
    SELECT coalesce(%(now)s::timestamptz, now()) AS at
), reopened AS (
    UPDATE {schema}.cyclone_steps s
    SET state = 'available', ord = nextval('{schema}.cyclone_ids'), ready_at = clock.at, finished_at = NULL,
        max_attempts = least(s.attempts::bigint + %(additional_attempts)s::bigint, 2147483647)::integer,
        reclaims = 0, snoozes = 0, isolated = false, resume = false, fate = NULL, error_kind = NULL, error = NULL, last_crash = NULL,
        key_held = s.unique_key IS NOT NULL
    FROM clock
    WHERE s.id = ANY(%(ids)s::bigint[]) AND s.state = 'discarded'
    RETURNING s.id, s.run_id, s.node, s.kind, s.queue, s.priority, s.ord, s.attempts, clock.at
), tickets AS (
    INSERT INTO {schema}.cyclone_ready (lane, rank, ord, step) SELECT queue, priority * 2 + 1, ord, id FROM reopened
), events AS (
    INSERT INTO {schema}.cyclone_events (at, kind, step, run_id, node, step_kind, queue, attempt, actor, host, detail)
    SELECT at, 'reopened', id, run_id, node, kind, queue, attempts, coalesce(%(actor)s::text, session_user), %(host)s::text,
           jsonb_strip_nulls(jsonb_build_object('reason', %(reason)s::text, 'additional_attempts', %(additional_attempts)s::bigint))
    FROM reopened ORDER BY id
    RETURNING *
), news AS MATERIALIZED (
    SELECT EXISTS (
        SELECT FROM {schema}.cyclone_sleepers z, coalesce(%(now)s::timestamptz, clock_timestamp()) AS moment
        WHERE z.until > moment AND z.notified_at < moment - interval '10 milliseconds') AS asleep
), told AS MATERIALIZED (
    SELECT pg_notify(%(channel)s, '') FROM news WHERE asleep AND %(notify)s::boolean
)
SELECT row_to_json(e)::text, (SELECT asleep FROM news), (SELECT count(*) FROM told) FROM events e ORDER BY e.step;
