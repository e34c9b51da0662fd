-- name: end_expired_lives
-- Ending is a commit of its own, before anything is taken from the life: from here on its renewals and claims are refused.
UPDATE {schema}.cyclone_lives SET ended_at = coalesce(%(now)s, now()), end_reason = 'lease expired'
WHERE id IN (
    SELECT id FROM {schema}.cyclone_lives WHERE ended_at IS NULL AND lease_until < coalesce(%(now)s, now())
    ORDER BY id FOR UPDATE SKIP LOCKED)
RETURNING id, host, pid;

-- name: reclaim_steps
-- Takes back what dead lives hold, a few claims at a time. A standing query: a dead worker's last statement may commit after
-- this has looked, and the next look finds it. The claim rows come first, with SKIP LOCKED, so sweepers never share one;
-- steps are skipped when locked, and their claim stays for the next look.
-- A step counts a reclaim when it was being executed, or when nobody can tell; it then repeats the same attempt. The others
-- return as they were. At the limit of its kind a step is discarded as crashed instead. One that was being executed at
-- two deaths (four when nobody could tell what was executed) goes to a lane of its own and is run alone from then on, so
-- that it cannot take its neighbours down again. Only what counts a reclaim is an event. A node of a run at its limit is
-- kept as it is: its end touches the run, whose lock comes before any step's (crashed_nodes).
WITH dead AS MATERIALIZED (
    SELECT c.id, c.steps, l.executing, l.host, coalesce(l.end_reason, 'life unknown') AS reason
    FROM {schema}.cyclone_claims c LEFT JOIN {schema}.cyclone_lives l ON l.id = c.life
    WHERE l.id IS NULL OR l.ended_at IS NOT NULL
    ORDER BY c.id LIMIT %(claims)s FOR UPDATE OF c SKIP LOCKED
), held AS MATERIALIZED (
    SELECT s.id, s.claim, d.reason, d.host, coalesce(s.id = ANY(d.executing), true) AS executed,
           d.executing IS NOT NULL AS attributed, coalesce(k.max_reclaims, 2147483647) AS most,
           s.graph IS NOT NULL AND coalesce(s.id = ANY(d.executing), true) AND s.reclaims + 1 >= k.max_reclaims AS kept
    FROM {schema}.cyclone_steps s
    JOIN (SELECT id, reason, host, executing, unnest(steps) AS step FROM dead) d ON d.step = s.id AND d.id = s.claim
    LEFT JOIN {schema}.cyclone_kinds k ON k.kind = s.kind AND k.version = s.version
    WHERE s.state = 'running' AND s.id = ANY (ARRAY(SELECT unnest(steps) FROM dead))
    ORDER BY s.id FOR UPDATE OF s SKIP LOCKED
), moved AS (
    UPDATE {schema}.cyclone_steps s
    SET state = CASE WHEN h.executed AND s.reclaims + 1 >= h.most THEN 'discarded' ELSE 'available' END,
        finished_at = CASE WHEN h.executed AND s.reclaims + 1 >= h.most THEN coalesce(%(now)s, now()) END,
        key_held = s.key_held AND NOT (h.executed AND s.reclaims + 1 >= h.most),
        ord = nextval('{schema}.cyclone_ids'), ready_at = coalesce(%(now)s, now()),
        reclaims = s.reclaims + CASE WHEN h.executed THEN 1 ELSE 0 END,
        attempts = s.attempts - CASE WHEN h.executed OR s.resume THEN 0 ELSE 1 END,
        resume = h.executed OR s.resume,
        isolated = s.isolated OR h.executed AND s.reclaims + 1 >= CASE WHEN h.attributed THEN 2 ELSE 4 END,
        last_crash = CASE WHEN h.executed THEN h.reason ELSE s.last_crash END,
        error_kind = CASE WHEN h.executed AND s.reclaims + 1 >= h.most THEN 'crashed' ELSE s.error_kind END,
        error = CASE WHEN h.executed AND s.reclaims + 1 >= h.most
                     THEN format('the worker died %%s times while it ran this step; the last time: %%s', s.reclaims + 1, h.reason)
                     ELSE s.error END
    FROM held h
    WHERE s.id = h.id AND s.id = ANY (ARRAY(SELECT id FROM held))
      AND s.claim = h.claim AND s.state = 'running' AND h.kept IS NOT TRUE
    RETURNING s.id, s.run_id, s.node, s.kind, s.queue, s.isolated, s.priority, s.ord, s.state, s.attempts, s.reclaims, s.error,
              h.executed, h.reason, h.host
), tickets AS (
    INSERT INTO {schema}.cyclone_ready (lane, rank, ord, step)
    SELECT CASE WHEN isolated THEN '!' || queue ELSE queue END, priority * 2, ord, id FROM moved WHERE state = 'available'
), failures AS (
    INSERT INTO {schema}.cyclone_errors (step, attempt, at, kind, message, traceback)
    SELECT id, attempts, coalesce(%(now)s, now()), 'crashed', error, '' FROM moved WHERE state = 'discarded'
), events AS (
    INSERT INTO {schema}.cyclone_events (at, kind, step, run_id, node, step_kind, queue, attempt, host, detail)
    SELECT coalesce(%(now)s, now()), CASE state WHEN 'discarded' THEN 'discarded' ELSE 'reclaimed' END, id, run_id, node, kind, queue,
           attempts, host, jsonb_strip_nulls(jsonb_build_object(
               'reason', reason, 'reclaims', reclaims,
               'error_kind', CASE state WHEN 'discarded' THEN 'crashed' END,
               'error', CASE state WHEN 'discarded' THEN left(error, 1000) END))
    FROM moved WHERE executed
    RETURNING *
), closed AS (
    -- A claim goes when every step it names that is still running under it has just been moved.
    DELETE FROM {schema}.cyclone_claims c USING dead d
    WHERE c.id = d.id AND NOT EXISTS (
        SELECT FROM {schema}.cyclone_steps s
        WHERE s.id = ANY(d.steps) AND s.claim = d.id AND s.state = 'running' AND s.id NOT IN (SELECT id FROM moved))
    RETURNING c.id
)
SELECT (SELECT count(*) FROM closed) AS closed, (SELECT count(*) FROM held WHERE kept) AS kept, m.id, m.run_id, m.node, m.kind, m.state, m.attempts, m.reclaims, m.executed, m.reason,
       row_to_json(e)::text
FROM (SELECT 1) one LEFT JOIN moved m ON true LEFT JOIN events e ON e.step = m.id;

-- name: crashed_nodes
-- Nodes of runs that dead workers were executing, at the limit of their kind.
SELECT s.id, s.claim, s.run_id, s.kind, s.reclaims + 1, coalesce(l.end_reason, 'life unknown')
FROM {schema}.cyclone_claims c LEFT JOIN {schema}.cyclone_lives l ON l.id = c.life
CROSS JOIN LATERAL (
    SELECT * FROM {schema}.cyclone_steps
    WHERE id = ANY(c.steps) AND claim = c.id AND state = 'running' AND graph IS NOT NULL OFFSET 0
) s
JOIN {schema}.cyclone_kinds k ON k.kind = s.kind AND k.version = s.version
WHERE (l.id IS NULL OR l.ended_at IS NOT NULL) AND coalesce(s.id = ANY(l.executing), true) AND s.reclaims + 1 >= k.max_reclaims
ORDER BY s.id LIMIT 100;

-- name: count_crash
UPDATE {schema}.cyclone_steps SET reclaims = reclaims + 1, last_crash = %(reason)s
WHERE id = %(id)s AND claim = %(claim)s AND state = 'discarded';

-- name: end_due_runs
-- Runs whose deadline has passed. Their steps are many: a few runs in one transaction.
SELECT count(*) FROM (
    SELECT {schema}.cyclone_end_run(
        d.id, 'deadline', NULL, 'deadline', 'the deadline of the run has passed', NULL, %(host)s::text,
        coalesce(%(now)s::timestamptz, clock_timestamp()))
    FROM (SELECT id FROM {schema}.cyclone_runs WHERE due_at <= coalesce(%(now)s::timestamptz, now()) AND state = 'running'
          ORDER BY due_at LIMIT 5 FOR UPDATE SKIP LOCKED) d
) ended;

-- name: end_steps
-- One round of ending what is left of a run that has ended early. Null when there is no such run.
SELECT {schema}.cyclone_end_steps(e.id, 1000, coalesce(%(now)s::timestamptz, clock_timestamp()))
FROM (SELECT id FROM {schema}.cyclone_runs WHERE ending IS NOT NULL ORDER BY id LIMIT 1 FOR UPDATE SKIP LOCKED) e;

-- name: look_around
-- What there is to do, for one round of a sweeper: an idle one costs this statement and no more.
SELECT EXISTS (SELECT FROM {schema}.cyclone_lives WHERE ended_at IS NULL AND lease_until < coalesce(%(now)s, now())) AS expired,
       EXISTS (SELECT FROM {schema}.cyclone_claims c LEFT JOIN {schema}.cyclone_lives l ON l.id = c.life
               WHERE l.id IS NULL OR l.ended_at IS NOT NULL) AS dead,
       EXISTS (SELECT FROM {schema}.cyclone_runs WHERE ending IS NOT NULL) AS ending,
       -- Both queries of an aggregate over a partial index end at its first entry.
       (SELECT extract(epoch FROM min(due_at) - coalesce(%(now)s, now()))::float8
        FROM {schema}.cyclone_steps WHERE due_at IS NOT NULL) AS step_due_s,
       (SELECT extract(epoch FROM min(due_at) - coalesce(%(now)s, now()))::float8
        FROM {schema}.cyclone_runs WHERE due_at IS NOT NULL) AS run_due_s,
       EXISTS (SELECT FROM {schema}.cyclone_ready) AS ready,
       -- Names of queues begin with neither mark, so these ranges hold nothing but steps that are to run alone.
       EXISTS (SELECT FROM {schema}.cyclone_ready WHERE lane >= '!' AND lane < '"')
       OR EXISTS (SELECT FROM {schema}.cyclone_ready WHERE lane >= '?!' AND lane < '?"') AS isolated;

-- name: fire_due
-- Steps that are due become available, oldest first, each with a new ticket.
WITH due AS MATERIALIZED (
    SELECT id FROM {schema}.cyclone_steps WHERE due_at <= coalesce(%(now)s, now())
    ORDER BY due_at LIMIT %(batch)s FOR UPDATE SKIP LOCKED
), turn AS MATERIALIZED (
    -- Drawn here, where the order is known: an update visits its rows as the join likes.
    SELECT id, nextval('{schema}.cyclone_ids') AS ord FROM due
), fired AS (
    UPDATE {schema}.cyclone_steps s
    SET state = 'available', due_at = NULL, ready_at = coalesce(%(now)s, now()), ord = turn.ord
    -- The array says the same once more: without it a plan for any batch size may merge with the whole of the steps.
    FROM turn WHERE s.id = turn.id AND s.id = ANY (ARRAY(SELECT id FROM turn)) AND s.state = 'scheduled'
    RETURNING s.id, s.queue, s.isolated, s.priority, s.ord
), tickets AS (
    INSERT INTO {schema}.cyclone_ready (lane, rank, ord, step)
    SELECT CASE WHEN isolated THEN '!' || queue ELSE queue END, priority * 2 + 1, ord, id FROM fired
)
SELECT count(*) FROM fired;

-- name: close_claims
-- Claims of living workers that no running step names any more: the worker's own delete had met a lock. Old ones only, since
-- the settle that ends the last step deletes its claim itself.
DELETE FROM {schema}.cyclone_claims WHERE id IN (
    SELECT c.id FROM {schema}.cyclone_claims c
    WHERE c.claimed_at < coalesce(%(now)s, now()) - interval '1 minute'
      AND NOT EXISTS (SELECT FROM {schema}.cyclone_steps s WHERE s.id = ANY(c.steps) AND s.claim = c.id AND s.state = 'running')
    ORDER BY c.id LIMIT %(batch)s FOR UPDATE OF c SKIP LOCKED);

-- name: close_tickets
-- Tickets whose step is gone. A claim cannot see them, since it joins the step, so nobody else would ever remove them.
DELETE FROM {schema}.cyclone_ready r WHERE NOT EXISTS (SELECT FROM {schema}.cyclone_steps s WHERE s.id = r.step)
AND r.ctid = ANY (ARRAY(SELECT ctid FROM {schema}.cyclone_ready ORDER BY lane, rank, ord LIMIT %(batch)s FOR UPDATE SKIP LOCKED));

-- name: close_lives
-- Lives that ended a day ago and have neither claims nor orders left.
DELETE FROM {schema}.cyclone_lives l
WHERE l.ended_at < coalesce(%(now)s, now()) - interval '1 day'
  AND NOT EXISTS (SELECT FROM {schema}.cyclone_claims c WHERE c.life = l.id);

-- name: close_orders
DELETE FROM {schema}.cyclone_orders o WHERE o.ordered_at < coalesce(%(now)s, now()) - interval '10 minutes';

-- name: close_sleepers
DELETE FROM {schema}.cyclone_sleepers WHERE until < coalesce(%(now)s, now()) - interval '1 minute';

-- name: close_lanes
-- Drops the rows of empty lanes. A claim may put a ticket into a lane whose row goes at the same moment: open_lanes finds it.
DELETE FROM {schema}.cyclone_lanes l
WHERE l.created_at < coalesce(%(now)s, now()) - interval '1 minute'
  AND NOT EXISTS (SELECT FROM {schema}.cyclone_ready r WHERE r.lane = l.lane);

-- name: open_lanes
-- Every lane of strangers that has a ticket gets its row back. Walks from lane to lane, not from ticket to ticket.
WITH RECURSIVE lane(name) AS (
    SELECT (SELECT lane FROM {schema}.cyclone_ready WHERE lane > '?' AND lane < '@' ORDER BY lane LIMIT 1)
    UNION ALL
    SELECT (SELECT r.lane FROM {schema}.cyclone_ready r WHERE r.lane > lane.name AND r.lane < '@' ORDER BY r.lane LIMIT 1)
    FROM lane WHERE lane.name IS NOT NULL
)
INSERT INTO {schema}.cyclone_lanes (lane, queue, kind, version)
SELECT l.name, substr(split_part(l.name, chr(31), 1), 2), split_part(l.name, chr(31), 2), split_part(l.name, chr(31), 3)::integer
FROM lane l WHERE l.name IS NOT NULL AND NOT EXISTS (SELECT FROM {schema}.cyclone_lanes o WHERE o.lane = l.name)
ORDER BY l.name ON CONFLICT (lane) DO NOTHING;

-- name: queue_depths
-- Depth and age per queue, counted up to a cap: what waits may be ten million rows, and a scrape must stay cheap.
-- Lanes of strangers and of isolated steps count for their queue. The age is that of the oldest ticket of each lane and rank.
WITH RECURSIVE place(lane, rank) AS (
    (SELECT lane, rank FROM {schema}.cyclone_ready ORDER BY lane, rank LIMIT 1)
    UNION ALL
    SELECT n.lane, n.rank FROM place p CROSS JOIN LATERAL (
        SELECT lane, rank FROM {schema}.cyclone_ready r WHERE (r.lane, r.rank) > (p.lane, p.rank) ORDER BY lane, rank LIMIT 1) n
), counted AS (
    SELECT p.lane, p.rank,
           (SELECT count(*) FROM (SELECT FROM {schema}.cyclone_ready r WHERE r.lane = p.lane AND r.rank = p.rank LIMIT %(cap)s) c) AS n,
           (SELECT min(s.ready_at) FROM (
                SELECT step, ord FROM {schema}.cyclone_ready r WHERE r.lane = p.lane AND r.rank = p.rank ORDER BY ord LIMIT 100) t
            JOIN {schema}.cyclone_steps s ON s.id = t.step AND s.ord = t.ord AND s.state = 'available') AS oldest
    FROM place p
)
SELECT ltrim(split_part(lane, chr(31), 1), '?!') AS queue,
       sum(n)::bigint, coalesce(extract(epoch FROM coalesce(%(now)s, now()) - min(oldest)), 0)::float8
FROM counted GROUP BY 1;

-- name: isolated_waiting
-- Whether a step waits to be run alone. Names of queues begin with neither mark, so this range holds nothing else.
SELECT EXISTS (SELECT FROM {schema}.cyclone_ready WHERE lane >= '!' AND lane < '"')
    OR EXISTS (SELECT FROM {schema}.cyclone_ready WHERE lane >= '?!' AND lane < '?"');

-- name: unclaimable
-- Kinds that wait although no live worker has them.
SELECT l.kind, l.version,
       (SELECT count(*) FROM (SELECT FROM {schema}.cyclone_ready r WHERE r.lane = l.lane LIMIT %(cap)s) c)
FROM {schema}.cyclone_lanes l
WHERE NOT EXISTS (
    SELECT FROM {schema}.cyclone_lives v, unnest(v.kinds, v.versions) AS k(kind, version)
    WHERE v.ended_at IS NULL AND k.kind = l.kind AND k.version = l.version);

-- name: scheduled_count
SELECT count(*) FROM (SELECT FROM {schema}.cyclone_steps WHERE due_at IS NOT NULL LIMIT %(cap)s) c;
