-- name: lock_step
-- Locked in a statement of its own: one that waited for the lock sees the step's newest version, but no row that was
-- inserted meanwhile, and the claim that an order is looked up by may be such a row.
SELECT id, state FROM {schema}.cyclone_steps WHERE run_id = %(run_id)s AND node = %(node)s FOR UPDATE;

-- name: cancel_step
-- Ends a locked step that is not terminal. A running handler is told by an order to the life that has it; its outcome is
-- refused from now on, for the step is no longer running. The ticket stays, and the claim that meets it finds it stale.
-- Answers with the event, or with nothing when the step had ended already.
WITH ended AS (
    UPDATE {schema}.cyclone_steps
    SET state = 'cancelled', finished_at = coalesce(%(now)s::timestamptz, now()), due_at = NULL, error_kind = 'cancelled', error = %(reason)s::text
    WHERE id = %(id)s AND state IN ('pending', 'scheduled', 'available', 'running', 'waiting')
    RETURNING id, run_id, node, kind, queue, attempts, claim
), ordered AS (
    INSERT INTO {schema}.cyclone_orders (life, step, claim, reason, ordered_at)
    SELECT c.life, e.id, e.claim, %(reason)s::text, coalesce(%(now)s::timestamptz, now())
    FROM ended e JOIN {schema}.cyclone_claims c ON c.id = e.claim WHERE %(running)s::boolean
), events AS (
    INSERT INTO {schema}.cyclone_events (at, kind, step, run_id, node, step_kind, queue, attempt, actor, host, detail)
    SELECT coalesce(%(now)s::timestamptz, now()), 'cancelled', id, run_id, node, kind, queue, attempts,
           coalesce(%(actor)s::text, session_user), %(host)s::text, jsonb_build_object('reason', %(reason)s::text)
    FROM ended
    RETURNING *
)
SELECT row_to_json(e)::text FROM events e;

-- name: lock_discarded
-- The discarded steps of a run, by id. One that is no longer discarded once its lock is there is left out. Whoever finds
-- none is told by `known` whether there is such a run at all.
WITH found AS MATERIALIZED (
    SELECT id FROM {schema}.cyclone_steps WHERE run_id = %(run_id)s AND state = 'discarded' ORDER BY id FOR UPDATE
)
SELECT array(SELECT id FROM found ORDER BY id), EXISTS (SELECT FROM {schema}.cyclone_steps WHERE run_id = %(run_id)s) AS known;

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
        reclaims = 0, snoozes = 0, isolated = false, resume = false, error_kind = NULL, error = NULL, last_crash = NULL
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
