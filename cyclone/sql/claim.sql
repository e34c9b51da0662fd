-- name: claim_steps
-- Takes up to %(room)s tickets and makes their steps running under the claim that the worker made, in one round trip.
--
-- Hazards. The probe must follow the key (lane, rank, ord) and stop at the limit, or it reads and locks the whole backlog:
-- hence a nested loop over places with a limited sub-select, not `lane = ANY(...) ORDER BY ... LIMIT`, which sorts everything.
-- Ticket and step are locked together and skipped when locked, so a claim never waits for anybody. Tickets are deleted by
-- ctid (they are never updated, so it cannot move under the lock); steps are updated by id, because a step that changed
-- after the snapshot has its newest version at a ctid that the snapshot cannot see. The guard `state and ord` is what makes
-- a stale ticket harmless. Steps of a kind this life does not know move to a lane of their own, with the same ord, so that
-- the ticket they name stays theirs. A life that has ended gets nothing.
WITH me AS MATERIALIZED (
    SELECT kinds, versions FROM {schema}.cyclone_lives
    WHERE id = %(life)s AND ended_at IS NULL AND lease_until > coalesce(%(now)s, now())
), known AS MATERIALIZED (
    SELECT k.kind, k.version FROM me, unnest(me.kinds, me.versions) AS k(kind, version)
), lanes AS (
    SELECT q.queue AS lane, q.n FROM me, unnest(%(queues)s::text[]) WITH ORDINALITY AS q(queue, n)
    UNION ALL
    SELECT l.lane, 0 FROM {schema}.cyclone_lanes l JOIN known k ON k.kind = l.kind AND k.version = l.version
    WHERE l.queue = ANY(%(queues)s::text[])
), places AS MATERIALIZED (
    SELECT l.lane, r.rank FROM lanes l, unnest(%(ranks)s::smallint[]) WITH ORDINALITY AS r(rank, n) ORDER BY l.n, r.n
), taken AS MATERIALIZED (
    SELECT t.*, row_number() OVER () AS n
    FROM places p CROSS JOIN LATERAL (
        SELECT r.ctid AS ticket, r.lane, r.rank, r.ord, r.step, s.kind, s.version, s.queue,
               s.state = 'available' AND s.ord = r.ord AS valid
        FROM {schema}.cyclone_ready r JOIN {schema}.cyclone_steps s ON s.id = r.step
        WHERE r.lane = p.lane AND r.rank = p.rank
        ORDER BY r.ord LIMIT %(room)s
        FOR UPDATE OF r, s SKIP LOCKED
    ) t
    LIMIT %(room)s
), used AS (
    DELETE FROM {schema}.cyclone_ready WHERE ctid = ANY (ARRAY(SELECT ticket FROM taken))
), claimed AS (
    UPDATE {schema}.cyclone_steps s
    SET state = 'running', claim = %(claim)s, started_at = coalesce(%(now)s, now()),
        attempts = s.attempts + CASE WHEN s.resume THEN 0 ELSE 1 END
    FROM taken t JOIN known k ON k.kind = t.kind AND k.version = t.version
    WHERE s.id = t.step AND s.state = 'available' AND s.ord = t.ord
    RETURNING t.n, s.*
), written AS (
    INSERT INTO {schema}.cyclone_claims (id, life, steps)
    SELECT %(claim)s, %(life)s, array_agg(id) FROM claimed HAVING count(*) > 0
), strangers AS MATERIALIZED (
    SELECT t.*, '?' || t.lane || chr(31) || t.kind || chr(31) || t.version AS stranger_lane
    FROM taken t LEFT JOIN known k ON k.kind = t.kind AND k.version = t.version
    WHERE k.kind IS NULL AND t.valid
), moved AS (
    INSERT INTO {schema}.cyclone_ready (lane, rank, ord, step) SELECT stranger_lane, rank, ord, step FROM strangers
), opened AS (
    INSERT INTO {schema}.cyclone_lanes (lane, queue, kind, version)
    SELECT DISTINCT s.stranger_lane, s.lane, s.kind, s.version FROM strangers s
    WHERE NOT EXISTS (SELECT FROM {schema}.cyclone_lanes l WHERE l.lane = s.stranger_lane) ORDER BY 1
    ON CONFLICT (lane) DO NOTHING
)
SELECT total.taken, c.id, c.run_id, c.node, c.kind, c.version, c.queue, c.input::text, c.attempts, c.max_attempts,
       c.reclaims, c.snoozes, c.timeout_s, c.resume, c.tags, c.metadata, c.enqueued_at, c.graph, c.pos, c.sink, c.deadline_at,
       extract(epoch FROM c.started_at - c.ready_at)::float8 AS waited_s
FROM (SELECT count(*) AS taken FROM taken) total LEFT JOIN claimed c ON true
ORDER BY c.n;
