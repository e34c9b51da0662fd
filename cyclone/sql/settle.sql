-- name: complete_steps
-- Completes many steps at once, each fenced by its claim. What comes back are only the exceptions: the steps that were not
-- completed, with what they are now, so that the caller can tell "busy" (still ours, locked by somebody) from "mine, already
-- done" (an earlier send of this batch had committed) from "refused" (the claim was lost).
--
-- The update waits for a locked step only as long as the short lock_timeout of the session (55P03); the batch is then sent
-- again with `step_over`, which leaves locked steps out. Locking first in every batch cost a fifth of the rate (30k against
-- 37k steps/s). The lock_timeout is far below deadlock_timeout, so this statement gives way before a deadlock is ever
-- reported to anybody, whatever the order in which the join visits the rows.
-- Arrays go in binary (`b`): in text the driver writes them in Python, 20 µs a step with 100-byte outputs against 2 µs.
-- `s.id = ANY` says what the join says once more, here and wherever many steps are joined with what was sent: a plan is kept,
-- may be made while the table is empty, and would read all steps for ever. For the same reason the session allows hash joins
-- only: with small numbers before its eyes the server would compare each pair (100 µs a step).
-- A claim row is deleted with its last step, unless a step of the batch was left out: then it may still be running under it,
-- and a claim that is missing would never be reclaimed. A locked claim row is left for the sweeper.
WITH sent AS MATERIALIZED (
    SELECT * FROM unnest(%(ids)b::bigint[], %(claims)b::bigint[], %(outputs)b::text[]) AS d(id, claim, output)
), free AS MATERIALIZED (
    SELECT s.id FROM {schema}.cyclone_steps s
    WHERE %(step_over)s AND s.id = ANY(%(ids)b::bigint[]) FOR UPDATE SKIP LOCKED
), done AS (
    UPDATE {schema}.cyclone_steps s
    SET state = 'completed', output = d.output::jsonb, finished_at = coalesce(%(now)s, now()), error_kind = NULL, error = NULL,
        key_held = false
    FROM sent d
    WHERE s.id = d.id AND s.id = ANY(%(ids)b::bigint[]) AND s.claim = d.claim AND s.state = 'running'
      AND (NOT %(step_over)s OR s.id IN (SELECT id FROM free))
    RETURNING s.id
), closed AS (
    DELETE FROM {schema}.cyclone_claims WHERE id = ANY (ARRAY(
        SELECT id FROM {schema}.cyclone_claims WHERE id = ANY(%(closed)s::bigint[]) FOR UPDATE SKIP LOCKED))
      AND (SELECT count(*) FROM done) = cardinality(%(ids)b::bigint[])
)
SELECT d.id, s.state, s.claim FROM (
    -- The planner expects one row of `done`, and would compare each pair for a NOT EXISTS.
    SELECT id FROM sent WHERE (SELECT count(*) FROM done) < cardinality(%(ids)b::bigint[]) EXCEPT SELECT id FROM done
) d LEFT JOIN {schema}.cyclone_steps s ON s.id = d.id AND s.id = ANY(%(ids)b::bigint[]);

-- name: return_steps
-- Every other outcome of an execution: retry and snooze (due later, or available at once when the delay is nothing), discard,
-- release. The claim stays on the step, so that a batch sent twice knows itself. Answers like complete_steps.
-- A release of a step whose handler was never called takes back the attempt that the claim counted, unless the claim had
-- repeated one; released work gets the lower rank, so it goes first within its priority. A release is an event only when the
-- handler was called: a drain gives back hundreds of steps that nothing has happened to.
WITH sent AS MATERIALIZED (
    SELECT * FROM unnest(%(ids)s::bigint[], %(claims)s::bigint[], %(verbs)s::text[], %(states)s::text[],
                         %(delays)s::float8[], %(called)s::boolean[],
                         %(kinds)s::text[], %(messages)s::text[], %(tracebacks)s::text[])
           AS d(id, claim, verb, state, delay_s, called, error_kind, message, traceback)
), free AS MATERIALIZED (
    SELECT s.id FROM {schema}.cyclone_steps s
    WHERE s.id = ANY(%(ids)s::bigint[]) ORDER BY s.id FOR UPDATE SKIP LOCKED
), moved AS (
    UPDATE {schema}.cyclone_steps s
    SET state = d.state,
        due_at = CASE d.state WHEN 'scheduled' THEN coalesce(%(now)s, now()) + d.delay_s * interval '1 second' END,
        finished_at = CASE WHEN d.state IN ('discarded', 'cancelled') THEN coalesce(%(now)s, now()) END,
        key_held = s.key_held AND d.state NOT IN ('discarded', 'cancelled'),
        ready_at = CASE d.state WHEN 'available' THEN coalesce(%(now)s, now()) ELSE s.ready_at END,
        ord = CASE d.state WHEN 'available' THEN nextval('{schema}.cyclone_ids') ELSE s.ord END,
        attempts = s.attempts - CASE WHEN d.called OR s.resume THEN 0 ELSE 1 END,
        resume = CASE d.verb WHEN 'snooze' THEN true WHEN 'release' THEN d.called OR s.resume ELSE false END,
        snoozes = s.snoozes + CASE d.verb WHEN 'snooze' THEN 1 ELSE 0 END,
        error_kind = coalesce(d.error_kind, s.error_kind), error = coalesce(d.message, s.error)
    FROM sent d JOIN free f ON f.id = d.id
    WHERE s.id = d.id AND s.id = ANY(%(ids)s::bigint[]) AND s.claim = d.claim AND s.state = 'running'
    RETURNING s.id, s.run_id, s.node, s.kind, s.queue, s.isolated, s.priority, s.ord, s.state, s.attempts, s.snoozes,
              d.verb, d.delay_s, d.called, d.error_kind, d.message, d.traceback
), tickets AS (
    INSERT INTO {schema}.cyclone_ready (lane, rank, ord, step)
    SELECT CASE WHEN isolated THEN '!' || queue ELSE queue END, priority * 2 + CASE verb WHEN 'release' THEN 0 ELSE 1 END, ord, id FROM moved WHERE state = 'available'
), failures AS (
    INSERT INTO {schema}.cyclone_errors (step, attempt, at, kind, message, traceback)
    SELECT id, attempts, coalesce(%(now)s, now()), error_kind, message, traceback FROM moved
    WHERE error_kind IS NOT NULL AND state <> 'cancelled'
), events AS (
    INSERT INTO {schema}.cyclone_events (at, kind, step, run_id, node, step_kind, queue, attempt, host, detail)
    SELECT coalesce(%(now)s, now()), e.kind, id, run_id, node, m.kind, queue, attempts, %(host)s::text,
           jsonb_strip_nulls(jsonb_build_object(
               'delay_s', CASE WHEN verb IN ('retry', 'snooze') THEN delay_s END,
               'snoozes', CASE verb WHEN 'snooze' THEN snoozes END,
               'error_kind', error_kind, 'error', left(message, 1000), 'reason', CASE verb WHEN 'cancel_run' THEN message END))
    FROM moved m JOIN (VALUES ('retry', 'retry_scheduled'), ('snooze', 'snoozed'), ('discard', 'discarded'),
                              ('release', 'released'), ('cancel_run', 'cancelled'))
         AS e(verb, kind) USING (verb)
    WHERE verb <> 'release' OR called
)
SELECT d.id, s.state, s.claim FROM (
    -- The planner expects one row of `moved`, and would compare each pair for a NOT EXISTS.
    SELECT id FROM sent WHERE (SELECT count(*) FROM moved) < cardinality(%(ids)s::bigint[]) EXCEPT SELECT id FROM moved
) d LEFT JOIN {schema}.cyclone_steps s ON s.id = d.id AND s.id = ANY(%(ids)s::bigint[]);

-- name: lock_runs
-- First of all in a settle that may end runs: everybody takes runs in this order, and before any step.
SELECT id FROM {schema}.cyclone_runs WHERE id = ANY(%(runs)b::bigint[]) ORDER BY id FOR UPDATE;

-- name: complete_nodes
-- The second migration says how. Runs are locked first when there are any.
SELECT made, id, state, claim FROM {schema}.cyclone_complete_nodes(
    %(ids)b::bigint[], %(claims)b::bigint[], %(outputs)b::text[], %(closed)s::bigint[], %(runs)b::bigint[],
    %(step_over)s::boolean, %(now)s::timestamptz);

-- name: fail_nodes
SELECT made, id, state, claim FROM {schema}.cyclone_fail_nodes(
    %(ids)s::bigint[], %(claims)s::bigint[], %(verbs)s::text[], %(kinds)s::text[], %(messages)s::text[],
    %(tracebacks)s::text[], %(called)s::boolean[], %(runs)s::bigint[], %(host)s::text, %(step_over)s::boolean,
    %(now)s::timestamptz);

-- name: expand_map
SELECT made, id, state, claim FROM {schema}.cyclone_expand_map(
    %(id)s::bigint, %(claim)s::bigint, %(run)s::bigint, %(items)s::jsonb, %(now)s::timestamptz);

-- name: complete_in
-- Completes a step in a transaction of the handler's own. The caller raises on false, and whoever owns the transaction
-- rolls it back; nothing is set on the connection, so the statement waits for a lock as its owner's settings say.
SELECT {schema}.cyclone_complete(
    %(id)s::bigint, %(claim)s::bigint, %(run)s::bigint, %(output)s::text, %(now)s::timestamptz, NULL)::integer;
