-- name: begin_life
INSERT INTO {schema}.cyclone_lives (id, host, pid, queues, kinds, versions, lease_until)
VALUES (%(life)s, %(host)s, %(pid)s, %(queues)s, %(kinds)s, %(versions)s,
        coalesce(%(now)s, now()) + %(lease_s)s * interval '1 second')
ON CONFLICT (id) DO NOTHING;

-- name: renew_life
-- One row renews everything the worker holds. Zero rows: the life has ended and is never revived.
UPDATE {schema}.cyclone_lives SET lease_until = coalesce(%(now)s, now()) + %(lease_s)s * interval '1 second'
WHERE id = %(life)s AND ended_at IS NULL RETURNING id;

-- name: end_life
-- `executing` is what it was executing when it died; null when nobody can tell. The first to say so is believed.
UPDATE {schema}.cyclone_lives SET ended_at = coalesce(%(now)s, now()), end_reason = %(reason)s, executing = %(executing)s
WHERE id = %(life)s AND ended_at IS NULL RETURNING id;

-- name: take_orders
DELETE FROM {schema}.cyclone_orders WHERE life = %(life)s RETURNING step, claim, reason;

-- name: list_claims
SELECT id FROM {schema}.cyclone_claims WHERE life = %(life)s;

-- name: release_claims
-- Gives back what a worker finds under its name but does not hold: claims whose reply was lost. No handler was called.
-- The claim rows are locked first, so that the sweeper and this never work on the same one.
WITH own AS MATERIALIZED (
    SELECT id, steps FROM {schema}.cyclone_claims
    WHERE id = ANY(%(claims)s::bigint[]) AND life = %(life)s FOR UPDATE SKIP LOCKED
), free AS MATERIALIZED (
    SELECT s.id FROM {schema}.cyclone_steps s
    WHERE s.id = ANY (ARRAY(SELECT unnest(steps) FROM own)) AND s.state = 'running' AND s.claim IN (SELECT id FROM own)
    ORDER BY s.id FOR UPDATE SKIP LOCKED
), moved AS (
    UPDATE {schema}.cyclone_steps s
    SET state = 'available', ord = nextval('{schema}.cyclone_ids'), ready_at = coalesce(%(now)s, now()),
        attempts = s.attempts - CASE WHEN s.resume THEN 0 ELSE 1 END
    WHERE s.id = ANY (ARRAY(SELECT id FROM free)) AND s.state = 'running' AND s.claim IN (SELECT id FROM own)
    RETURNING s.id, s.queue, s.isolated, s.priority, s.ord
), tickets AS (
    INSERT INTO {schema}.cyclone_ready (lane, rank, ord, step)
    SELECT CASE WHEN isolated THEN '!' || queue ELSE queue END, priority * 2, ord, id FROM moved
), closed AS (
    -- Also those whose steps have all ended: the settle that should have deleted one may just have found it locked by this.
    DELETE FROM {schema}.cyclone_claims c USING own o
    WHERE c.id = o.id AND NOT EXISTS (
        SELECT FROM {schema}.cyclone_steps s
        WHERE s.id = ANY(o.steps) AND s.claim = o.id AND s.state = 'running' AND s.id NOT IN (SELECT id FROM moved))
)
SELECT count(*) FROM moved;

-- name: sleep_until
-- A sleeper says that it wants to be notified, and until when that holds. Nobody needs this to survive a crash.
INSERT INTO {schema}.cyclone_sleepers (id, until)
VALUES (%(sleeper)s, coalesce(%(now)s, now()) + %(seconds)s * interval '1 second')
ON CONFLICT (id) DO UPDATE SET until = excluded.until;

-- name: sleep_no_more
DELETE FROM {schema}.cyclone_sleepers WHERE id = %(sleeper)s;
