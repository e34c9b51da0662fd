-- Each of these is fenced: it takes effect only while the step runs under our claim, whose row it holds for the moment of
-- its own commit (FOR SHARE: a reclaim at the same time comes either before or after it).

-- name: begin_call
-- Notes that an outside call is begun, before it is. Answers with what was known until now: the value of an earlier call, or
-- the claim of an execution that began one; nothing when the fence refused.
WITH held AS MATERIALIZED (
    SELECT id FROM {schema}.cyclone_steps WHERE id = %(step)s AND claim = %(claim)s AND state = 'running' FOR SHARE
), old AS MATERIALIZED (
    SELECT r.claim, r.value FROM {schema}.cyclone_records r JOIN held ON held.id = r.step
    WHERE r.sort = 'once' AND r.name = %(name)s
), begun AS (
    INSERT INTO {schema}.cyclone_records (step, sort, name, claim)
    SELECT id, 'once', %(name)s, %(claim)s FROM held WHERE NOT EXISTS (SELECT FROM old WHERE value IS NOT NULL)
    ON CONFLICT (step, sort, name) DO UPDATE SET claim = excluded.claim, at = now()
)
SELECT old.claim, old.value FROM held LEFT JOIN old ON true;

-- name: save_record
WITH held AS MATERIALIZED (
    SELECT id FROM {schema}.cyclone_steps WHERE id = %(step)s AND claim = %(claim)s AND state = 'running' FOR SHARE
)
INSERT INTO {schema}.cyclone_records (step, sort, name, claim, value)
SELECT id, %(sort)s, %(name)s, %(claim)s, %(value)s::jsonb FROM held
ON CONFLICT (step, sort, name) DO UPDATE SET claim = excluded.claim, value = excluded.value, at = now()
RETURNING step;

-- name: load_record
SELECT value FROM {schema}.cyclone_records WHERE step = %(step)s AND sort = %(sort)s AND name = %(name)s;
