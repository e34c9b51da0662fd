-- name: enqueue_steps
-- The first migration says how, and why this is a function.
SELECT ids, asleep::integer FROM {schema}.cyclone_store(
    %(kind)s::text, %(queue)s::text, %(priority)s::smallint, %(rank)s::smallint, %(version)s::integer,
    %(max_attempts)s::integer, %(timeout_s)s::float8, %(inputs)s::text[], %(tags)s::text[], %(metadata)s::jsonb,
    %(keep_for_s)s::float8, %(scheduled_at)s::timestamptz, %(delay_s)s::float8, %(channel)s::text, %(notify)s::boolean,
    %(now)s::timestamptz);

-- name: enqueue_unique
SELECT step, created, asleep FROM {schema}.cyclone_store_unique(
    %(kind)s::text, %(queue)s::text, %(priority)s::smallint, %(rank)s::smallint, %(version)s::integer,
    %(max_attempts)s::integer, %(timeout_s)s::float8, %(inputs)s::text[], %(keys)s::text[], %(strict)s::boolean,
    %(tags)s::text[], %(metadata)s::jsonb, %(keep_for_s)s::float8, %(scheduled_at)s::timestamptz, %(delay_s)s::float8,
    %(channel)s::text, %(notify)s::boolean, %(now)s::timestamptz);

-- name: wake_sleepers
-- After the commit of a submission on a connection of the engine's own. Whoever comes at the same moment skips the locked
-- rows, so one of many notifies. Nothing here needs to be durable; the setting ends with this statement.
WITH quick AS MATERIALIZED (
    SELECT set_config('synchronous_commit', 'off', true)
), woken AS (
    UPDATE {schema}.cyclone_sleepers SET notified_at = coalesce(%(now)s::timestamptz, clock_timestamp())
    WHERE id IN (
        SELECT z.id FROM quick, {schema}.cyclone_sleepers z, coalesce(%(now)s::timestamptz, clock_timestamp()) AS moment
        WHERE z.until > moment AND z.notified_at < moment - interval '10 milliseconds' FOR UPDATE OF z SKIP LOCKED)
    RETURNING id
)
SELECT count(*) FROM (SELECT pg_notify(%(channel)s, '') FROM woken LIMIT 1) told;

-- name: draw_ids
-- What a COPY needs to know beforehand: the ids, and the columns that are the same in all rows, as the server writes them.
SELECT (SELECT string_agg(nextval('{schema}.cyclone_ids')::text, ',') FROM generate_series(1, %(count)s)) AS ids,
       at::text, CASE WHEN due > at THEN due::text END AS due, %(timeout_s)s::float8::text AS timeout_s,
       %(tags)s::text[]::text AS tags, %(metadata)s::text AS metadata,
       (%(keep_for_s)s::float8 * interval '1 second')::text AS keep_for
FROM (SELECT coalesce(%(now)s::timestamptz, now()) AS at) c,
     LATERAL (SELECT coalesce(%(scheduled_at)s::timestamptz, c.at + %(delay_s)s::float8 * interval '1 second') AS due) d;

-- name: copy_steps
COPY {schema}.cyclone_steps (
    id, run_id, ord, input, enqueued_at, ready_at, due_at, state, node, kind, queue, priority, version, max_attempts, timeout_s,
    tags, metadata, keep_for) FROM STDIN;

-- name: insert_tickets
WITH tickets AS (
    INSERT INTO {schema}.cyclone_ready (lane, rank, ord, step)
    SELECT %(queue)s::text, %(rank)s::smallint, t.id, t.id FROM unnest(%(ids)s::bigint[]) AS t(id)
)
SELECT EXISTS (
    SELECT FROM {schema}.cyclone_sleepers z, coalesce(%(now)s::timestamptz, clock_timestamp()) AS moment
    WHERE z.until > moment AND z.notified_at < moment - interval '10 milliseconds')::integer;

-- name: submit_runs
-- The second migration says how. No row: the graph is not known here.
SELECT run_id, created, differs, asleep FROM {schema}.cyclone_submit_runs(
    %(hash)s::text, %(keys)s::text[], %(inputs)s::text[], %(queue)s::text, %(priority)s::smallint, %(tags)s::text[],
    %(metadata)s::jsonb, %(keep_for_s)s::float8, %(scheduled_at)s::timestamptz, %(delay_s)s::float8, %(deadline_s)s::float8,
    %(deadline_at)s::timestamptz, %(channel)s::text, %(notify)s::boolean, %(now)s::timestamptz);

-- name: register_graph
SELECT {schema}.cyclone_register(%(hash)s::text, %(spec)s::jsonb, %(newest)s::boolean)::text;

-- name: find_run
SELECT id::text FROM {schema}.cyclone_runs WHERE workflow = %(workflow)s::text AND submit_key = %(key)s::text;
