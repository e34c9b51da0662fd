-- name: enqueue_steps
-- The first migration says how, and why this is a function. Inputs come as one text, a line each, since no JSON that an
-- encoder writes has a line break: an array costs the driver 20 us for each of them.
SELECT {schema}.cyclone_store(
    %(kind)s::text, %(queue)s::text, %(priority)s::smallint, %(rank)s::smallint, %(version)s::integer,
    %(max_attempts)s::integer, %(timeout_s)s::float8, string_to_array(%(inputs)s::text, E'\n'), %(tags)s::text[],
    %(metadata)s::jsonb, %(keep_for_s)s::float8, %(scheduled_at)s::timestamptz, %(delay_s)s::float8, %(channel)s::text,
    %(notify)s::boolean, %(now)s::timestamptz);

-- name: enqueue_unique
SELECT step, created, asleep FROM {schema}.cyclone_store_unique(
    %(kind)s::text, %(queue)s::text, %(priority)s::smallint, %(rank)s::smallint, %(version)s::integer,
    %(max_attempts)s::integer, %(timeout_s)s::float8, string_to_array(%(inputs)s::text, E'\n'), %(keys)b::text[],
    %(strict)s::boolean, %(tags)s::text[], %(metadata)s::jsonb, %(keep_for_s)s::float8, %(scheduled_at)s::timestamptz,
    %(delay_s)s::float8, %(channel)s::text, %(notify)s::boolean, %(now)s::timestamptz);

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

-- name: notify
-- For a submission that owes it, after its commit; nothing here needs to be durable either.
SELECT pg_notify(%(channel)s::text, '')::text FROM (SELECT set_config('synchronous_commit', 'off', true) OFFSET 0) quick;

-- name: draw_ids
-- What a COPY needs to know beforehand: the ids, and what is the same in all rows, in the form that COPY takes. That depends
-- on the encoding of the client, and inputs are in UTF-8; the setting ends with this transaction.
WITH utf8 AS MATERIALIZED (
    SELECT set_config('client_encoding', 'UTF8', true)
)
SELECT (SELECT string_agg(nextval('{schema}.cyclone_ids')::text, ',') FROM generate_series(1, %(count)s)) AS ids,
       (due IS NULL)::integer AS ready,
       ARRAY[timestamptz_send(at), timestamptz_send(CASE WHEN due IS NULL THEN at END), timestamptz_send(due),
             textsend(CASE WHEN due IS NULL THEN 'available' ELSE 'scheduled' END), textsend(kind), textsend(kind),
             textsend(queue), int2send(%(priority)s::smallint), int4send(%(version)s::integer),
             int4send(%(max_attempts)s::integer), float8send(%(timeout_s)s::float8), array_send(%(tags)s::text[]),
             jsonb_send(%(metadata)s::jsonb), interval_send(%(keep_for_s)s::float8 * interval '1 second')] AS step,
       ARRAY[textsend(queue), int2send(%(rank)s::smallint)] AS ticket
FROM utf8, (SELECT coalesce(%(now)s::timestamptz, now()) AS at, %(kind)s::text AS kind, %(queue)s::text AS queue) c,
     LATERAL (SELECT coalesce(%(scheduled_at)s::timestamptz, c.at + %(delay_s)s::float8 * interval '1 second') AS later) l,
     LATERAL (SELECT CASE WHEN l.later > c.at THEN l.later END AS due) d;

-- name: copy_steps
COPY {schema}.cyclone_steps (
    id, run_id, ord, input, enqueued_at, ready_at, due_at, state, node, kind, queue, priority, version, max_attempts, timeout_s,
    tags, metadata, keep_for) FROM STDIN (FORMAT binary);

-- name: copy_tickets
COPY {schema}.cyclone_ready (ord, step, lane, rank) FROM STDIN (FORMAT binary);

-- name: submit_runs
-- The second migration says how. No row: the graph is not known here.
SELECT run_id, created, differs, asleep FROM {schema}.cyclone_submit_runs(
    %(hash)s::text, %(keys)b::text[], string_to_array(%(inputs)s::text, E'\n'), %(queue)s::text, %(priority)s::smallint,
    %(tags)s::text[], %(metadata)s::jsonb, %(keep_for_s)s::float8, %(scheduled_at)s::timestamptz, %(delay_s)s::float8,
    %(deadline_s)s::float8, %(deadline_at)s::timestamptz, %(channel)s::text, %(notify)s::boolean, %(now)s::timestamptz);

-- name: register_graph
SELECT {schema}.cyclone_register(%(hash)s::text, %(spec)s::jsonb, %(newest)s::boolean)::text;

-- name: find_run
SELECT id::text FROM {schema}.cyclone_runs WHERE workflow = %(workflow)s::text AND submit_key = %(key)s::text;
