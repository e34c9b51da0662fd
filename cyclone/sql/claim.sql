-- name: claim_steps
-- Takes up to %(room)s tickets and makes their steps running under the claim that the worker made, in one round trip.
--
-- Hazards. The probe must follow the key (lane, rank, ord) and stop at the limit, or it reads and locks the whole backlog:
-- hence a nested loop over places with a limited sub-select, not `lane = ANY(...) ORDER BY ... LIMIT`, which sorts everything.
-- Ticket and step are locked together and skipped when locked, so a claim never waits for anybody. Tickets are deleted by
-- ctid (they are never updated, so it cannot move under the lock); steps are updated by id, because a step that changed
-- after the snapshot has its newest version at a ctid that the snapshot cannot see. `valid`, judged under the lock, is what
-- makes a stale ticket harmless. Steps of a kind this life does not know move to a lane of their own, with the same ord, so
-- that the ticket they name stays theirs. A life that has ended gets nothing.
--
-- The plan is kept, and may be made while the tables are empty: a join of steps with tickets would then read all steps for
-- ever. But a sub-select that locks is never merged into another, so each step is looked up by its ticket; and the update
-- goes by an array of ids, whose index entries are read in one go. The large limit is never reached: it makes the planner
-- weigh what the first tickets cost and not what all do. The ticket is locked before the step: the other way round, what
-- another claim had just taken was locked once more, and four claimers used three times the CPU.
--
-- While any transaction holds an old snapshot, the index entries of tickets taken since can neither be removed nor be marked
-- as dead, and a probe from the beginning of a place steps over all of them: 150 ms for a million. So the worker says where to
-- begin: `floors` by place, `floor` for all others (see claim.py). The first row is about the look itself: how many tickets
-- were taken, the newest number that was drawn before it, the last `ord` taken from each place, and the order of the steps.
WITH me AS MATERIALIZED (
    -- The number is read here, before any ticket is: one that this look cannot see may be below it only by what is drawn
    -- within a transaction that is about to commit.
    SELECT kinds, versions, pg_sequence_last_value('{schema}.cyclone_ids') AS drawn FROM {schema}.cyclone_lives
    WHERE id = %(life)s AND ended_at IS NULL AND lease_until > coalesce(%(now)s, now())
), known AS MATERIALIZED (
    -- An object, since a join would compare each step with each kind: 3 µs a step for six of them.
    SELECT jsonb_object_agg(k.kind || chr(31) || k.version, true) AS kinds
    FROM me, unnest(me.kinds, me.versions) AS k(kind, version)
), lanes AS (
    SELECT q.queue AS lane, q.n FROM me, unnest(%(queues)s::text[]) WITH ORDINALITY AS q(queue, n)
    UNION ALL
    SELECT l.lane, 0 FROM {schema}.cyclone_lanes l
    WHERE l.queue = ANY(%(queues)s::text[]) AND (SELECT kinds FROM known) ? (l.kind || chr(31) || l.version)
), places AS MATERIALIZED (
    SELECT l.lane, r.rank, coalesce((%(floors)s::jsonb ->> (l.lane || ' ' || r.rank))::bigint, %(floor)s::bigint) AS floor
    FROM lanes l, unnest(%(ranks)s::smallint[]) WITH ORDINALITY AS r(rank, n) ORDER BY l.n, r.n
), taken AS MATERIALIZED (
    SELECT t.*
    FROM places p CROSS JOIN LATERAL (
        SELECT r.*, s.* FROM (
            SELECT r.ctid AS ticket, r.lane, r.rank, r.ord, r.step FROM {schema}.cyclone_ready r
            WHERE r.lane = p.lane AND r.rank = p.rank AND r.ord > p.floor
            ORDER BY r.ord LIMIT 1000000000 FOR UPDATE SKIP LOCKED
        ) r CROSS JOIN LATERAL (
            SELECT s.kind, s.version, s.state = 'available' AND s.ord = r.ord AS valid,
                   (SELECT kinds FROM known) ? (s.kind || chr(31) || s.version) AS known
            FROM {schema}.cyclone_steps s WHERE s.id = r.step FOR UPDATE SKIP LOCKED
        ) s
        LIMIT %(room)s
    ) t
    LIMIT %(room)s
), used AS (
    DELETE FROM {schema}.cyclone_ready WHERE ctid = ANY (ARRAY(SELECT ticket FROM taken))
), claimed AS (
    UPDATE {schema}.cyclone_steps s
    SET state = 'running', claim = %(claim)s, started_at = coalesce(%(now)s, now()),
        attempts = s.attempts + CASE WHEN s.resume THEN 0 ELSE 1 END
    WHERE s.id = ANY (ARRAY(SELECT step FROM taken WHERE valid AND known))
    RETURNING s.id, s.run_id, s.node, s.kind, s.version, s.queue, s.input::text AS input, s.attempts, s.max_attempts,
              s.reclaims, s.snoozes, s.timeout_s, s.resume, s.tags, s.metadata, s.enqueued_at, s.graph, s.pos, s.sink,
              s.deadline_at, extract(epoch FROM s.started_at - s.ready_at)::float8 AS waited_s
), written AS (
    INSERT INTO {schema}.cyclone_claims (id, life, steps)
    SELECT %(claim)s, %(life)s, array_agg(id) FROM claimed HAVING count(*) > 0
), strangers AS MATERIALIZED (
    SELECT t.*, '?' || t.lane || chr(31) || t.kind || chr(31) || t.version AS stranger_lane
    FROM taken t WHERE t.valid AND NOT t.known
), moved AS (
    INSERT INTO {schema}.cyclone_ready (lane, rank, ord, step) SELECT stranger_lane, rank, ord, step FROM strangers
), opened AS (
    INSERT INTO {schema}.cyclone_lanes (lane, queue, kind, version)
    SELECT DISTINCT s.stranger_lane, s.lane, s.kind, s.version FROM strangers s
    WHERE NOT EXISTS (SELECT FROM {schema}.cyclone_lanes l WHERE l.lane = s.stranger_lane) ORDER BY 1
    ON CONFLICT (lane) DO NOTHING
)
SELECT look.taken, look.drawn, look.floors, look.steps, c.id, c.run_id, c.node, c.kind, c.version, c.queue, c.input, c.attempts,
       c.max_attempts, c.reclaims, c.snoozes, c.timeout_s, c.resume, c.tags, c.metadata, c.enqueued_at, c.graph, c.pos, c.sink,
       c.deadline_at, c.waited_s
FROM (
    SELECT (SELECT count(*) FROM taken) AS taken, (SELECT drawn FROM me) AS drawn,
           (SELECT jsonb_object_agg(t.lane || ' ' || t.rank, t.ord)
            FROM (SELECT lane, rank, max(ord) AS ord FROM taken GROUP BY lane, rank) t) AS floors,
           ARRAY(SELECT step FROM taken) AS steps
) look FULL JOIN claimed c ON false
ORDER BY look.taken;
