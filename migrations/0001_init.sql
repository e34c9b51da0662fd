-- The whole schema of the first release.
-- transaction: yes
--
-- Storage in one paragraph: the step row is the truth and the lock. A row of cyclone_ready is a ticket to claim a step; it
-- may be stale, it is never missing. A row of cyclone_claims is one batch handed to one life of a worker, and the life holds
-- the only lease. Nothing here has a foreign key: on the hot path each would cost a lookup and a lock per row, and
-- `cyclone doctor --deep` checks what they would have promised.

-- One sequence numbers runs, steps and tickets alike: a fresh step's ticket can then carry the step's own number, which
-- saves a draw per enqueue. CACHE 1, because the order of tickets is the order in which work became available.
CREATE SEQUENCE {schema}.cyclone_ids AS bigint CACHE 1;

-- One version of a workflow's graph, stored once: a run keeps the graph it was submitted with, whatever is deployed later.
CREATE TABLE {schema}.cyclone_graphs (
    id            bigint PRIMARY KEY DEFAULT nextval('{schema}.cyclone_ids'),
    hash          text COLLATE "C" NOT NULL UNIQUE,
    workflow      text COLLATE "C" NOT NULL,
    version       integer NOT NULL,
    queue         text COLLATE "C",
    result        text COLLATE "C",             -- the node that gives the result
    sinks         integer NOT NULL,             -- how many nodes have nothing downstream
    spec          jsonb NOT NULL,               -- the whole graph, with the templates of its inputs
    registered_at timestamptz NOT NULL DEFAULT now()    -- the newest of a name is what SQL and the command line submit
);
CREATE INDEX cyclone_graphs_workflow ON {schema}.cyclone_graphs (workflow, registered_at);

-- What the rows of a new run's steps are made from.
CREATE TABLE {schema}.cyclone_graph_nodes (
    graph         bigint NOT NULL,
    pos           integer NOT NULL,             -- from 0; a parent's is below its children's
    name          text COLLATE "C" NOT NULL,
    kind          text COLLATE "C" NOT NULL,    -- of a map: the kind of its items
    version       integer NOT NULL,
    max_attempts  integer NOT NULL,
    timeout_s     double precision,
    queue         text COLLATE "C",             -- null: as the submission, the workflow or the step says
    priority      smallint,
    default_queue text COLLATE "C" NOT NULL,
    default_priority smallint NOT NULL,
    tags          text[],
    metadata      jsonb,
    parents       integer NOT NULL,             -- how many
    children      integer[] NOT NULL,
    map           boolean NOT NULL,
    max_parallel  integer,
    policy        smallint NOT NULL,            -- when a dependency fails: 0 the run does, 1 it is cancelled, 2 it runs
    accept_skipped boolean NOT NULL,
    contained     boolean NOT NULL,             -- its failure does not fail the run
    sink          boolean NOT NULL,             -- nothing is downstream
    PRIMARY KEY (graph, pos)
);

-- One submission of a workflow; also the lock of everything that decides about the run as a whole.
CREATE TABLE {schema}.cyclone_runs (
    id            bigint PRIMARY KEY,
    graph         bigint,
    created_at    timestamptz NOT NULL DEFAULT now(),
    finished_at   timestamptz,
    deadline_at   timestamptz,
    due_at        timestamptz,                  -- the deadline of a run that has not ended
    early_at      timestamptz,                  -- when it failed or was cancelled
    keep_for      interval,
    open_sinks    integer NOT NULL DEFAULT 0,   -- at zero everything has ended, and the run ends
    lost          boolean NOT NULL DEFAULT false,   -- its result cannot come any more: it will end as failed
    ending        text COLLATE "C" CHECK (ending IN ('failure', 'cancel', 'deadline')),  -- why what is left of it is to be ended
    workflow      text COLLATE "C" NOT NULL,
    submit_key    text COLLATE "C",
    state         text COLLATE "C" NOT NULL DEFAULT 'running' CHECK (state IN ('running', 'completed', 'failed', 'cancelled')),
    result_node   text COLLATE "C",
    error_node    text COLLATE "C",
    error_kind    text COLLATE "C",
    error         text,
    input         jsonb NOT NULL,
    tags          text[],
    metadata      jsonb,
    CHECK ((state = 'running') = (finished_at IS NULL)),
    CHECK (state <> 'running' OR ending IS NULL)
) WITH (fillfactor = 60);
CREATE UNIQUE INDEX idx_runs_submit_key ON {schema}.cyclone_runs (workflow, submit_key) WHERE submit_key IS NOT NULL;
-- None of these names a column that the plain end of a run changes, so that ending it stays on its page.
CREATE INDEX cyclone_runs_workflow ON {schema}.cyclone_runs (workflow, id);
CREATE INDEX cyclone_runs_tags ON {schema}.cyclone_runs USING gin (tags) WHERE tags IS NOT NULL;
CREATE INDEX cyclone_runs_due_at ON {schema}.cyclone_runs (due_at) WHERE due_at IS NOT NULL;
CREATE INDEX cyclone_runs_early_at ON {schema}.cyclone_runs (id) WHERE early_at IS NOT NULL;
CREATE INDEX cyclone_runs_ending ON {schema}.cyclone_runs (id) WHERE ending IS NOT NULL;

-- Claim and settle change a step twice, and each change must stay on its page (HOT): so no index, and no index predicate,
-- names a column that they touch, and the fillfactor leaves room for the versions a batch makes of a whole page at once
-- (measured: 100 -> 1 % HOT, 60 -> 69 %, 45 -> 98 %; where outputs of 100 bytes are stored 45 -> 89 %, 41 -> 92 %, 38 ->
-- 99 %). Columns that indexes name stand first, since every update compares them, and finding one behind fifty others
-- takes a walk over these.
CREATE TABLE {schema}.cyclone_steps (
    id            bigint PRIMARY KEY,
    run_id        bigint NOT NULL,              -- equal to id for a standalone step, which is a run of its own
    map_step      bigint,                       -- the map that it is an item of
    due_at        timestamptz,
    key_held      boolean NOT NULL DEFAULT false, -- its unique key is taken by it, which is so while it is active
    node          text COLLATE "C" NOT NULL,
    kind          text COLLATE "C" NOT NULL,
    unique_key    text COLLATE "C",
    graph         bigint,                       -- of its run; null for a standalone step, as all of what graphs need
    ord           bigint,                       -- the ticket this step names; any other ticket of it is stale
    claim         bigint,                       -- the last claim; kept when the step ends, so that a settle sent twice knows itself
    enqueued_at   timestamptz NOT NULL DEFAULT now(),
    ready_at      timestamptz,                  -- when it last became available
    started_at    timestamptz,                  -- when it was last claimed
    finished_at   timestamptz,
    deadline_at   timestamptz,                  -- of its run
    map_next      bigint,                       -- of a map with max_parallel: the last item that was let go
    timeout_s     double precision,
    pos           integer,                      -- in the graph
    pending       integer,                      -- how many parents (of a map that waits: items) have not ended
    attempts      integer NOT NULL DEFAULT 0,
    max_attempts  integer NOT NULL CHECK (max_attempts >= 1),
    version       integer NOT NULL DEFAULT 1,
    snoozes       integer NOT NULL DEFAULT 0,
    reclaims      integer NOT NULL DEFAULT 0,
    priority      smallint NOT NULL DEFAULT 5 CHECK (priority BETWEEN 0 AND 9),
    policy        smallint,                     -- as in cyclone_graph_nodes
    accept_skipped boolean,
    contained     boolean,
    sink          boolean,                      -- its end may end the run: nothing is downstream of it, or of its map
    resume        boolean NOT NULL DEFAULT false,   -- the next claim repeats attempt number `attempts` instead of starting a new one
    isolated      boolean NOT NULL DEFAULT false,   -- it was being executed at deaths of its workers: it runs alone
    state         text COLLATE "C" NOT NULL CHECK (state IN (
                      'pending', 'scheduled', 'available', 'running', 'waiting', 'completed', 'discarded', 'cancelled')),
    queue         text COLLATE "C" NOT NULL DEFAULT 'default',
    input         jsonb,                        -- null for a node: composed when it is executed, from what its run has
    output        jsonb,
    children      bigint[],
    -- Why it was or will be cancelled: a dependency of it failed, it was skipped, its run failed, ran out of time or was
    -- cancelled, or somebody cancelled it alone. Reopening restores what the failure took, and no more.
    fate          text COLLATE "C" CHECK (fate IN ('dependency', 'skipped', 'failure', 'deadline', 'cancel', 'alone')),
    error_kind    text COLLATE "C",
    error         text,
    last_crash    text,
    tags          text[],
    metadata      jsonb,
    keep_for      interval,
    CONSTRAINT cyclone_steps_run_node UNIQUE (run_id, node),
    CONSTRAINT cyclone_steps_finished CHECK ((state IN ('completed', 'discarded', 'cancelled')) = (finished_at IS NOT NULL)),
    CONSTRAINT cyclone_steps_due CHECK ((state = 'scheduled') = (due_at IS NOT NULL)),
    CONSTRAINT cyclone_steps_ticket CHECK (state <> 'available' OR ord IS NOT NULL),
    CONSTRAINT cyclone_steps_claim CHECK (state <> 'running' OR claim IS NOT NULL),
    -- So that no transition can forget to free a key. A generated column would do that by itself, but costs every update a
    -- copy of the whole row (1.5 µs each).
    CONSTRAINT cyclone_steps_key CHECK (
        key_held = (unique_key IS NOT NULL AND state NOT IN ('completed', 'discarded', 'cancelled')))
) WITH (fillfactor = 38, autovacuum_vacuum_scale_factor = 0.05, autovacuum_vacuum_insert_scale_factor = 0.2);
-- Only delays, backoff and snoozes set due_at, so claim and completion stay HOT.
CREATE INDEX cyclone_steps_due_at ON {schema}.cyclone_steps (due_at) WHERE due_at IS NOT NULL;
CREATE UNIQUE INDEX cyclone_steps_unique_key ON {schema}.cyclone_steps (kind, unique_key) WHERE key_held;
CREATE INDEX cyclone_steps_map_step ON {schema}.cyclone_steps (map_step, id) WHERE map_step IS NOT NULL;

-- Every failure of a step, also those that a later attempt made good.
CREATE TABLE {schema}.cyclone_errors (
    step          bigint NOT NULL,
    id            bigint NOT NULL DEFAULT nextval('{schema}.cyclone_ids'),
    attempt       integer NOT NULL,
    at            timestamptz NOT NULL,
    kind          text NOT NULL,
    message       text NOT NULL,
    traceback     text NOT NULL,
    PRIMARY KEY (step, id)
);

-- What a handler keeps beside its output: answers of outside calls, and checkpoints. They live as long as the step.
CREATE TABLE {schema}.cyclone_records (
    step          bigint NOT NULL,
    sort          text COLLATE "C" NOT NULL CHECK (sort IN ('once', 'checkpoint')),
    name          text COLLATE "C" NOT NULL,
    claim         bigint NOT NULL,              -- the execution that wrote it last
    value         jsonb,                        -- null: a call that was begun, and whose answer is not known
    at            timestamptz NOT NULL DEFAULT now(),
    PRIMARY KEY (step, sort, name)
);

-- What happened to steps beside the ordinary course: snoozes, failures, releases, reclaims, cancels, reopenings. A row is
-- written by the very statement that makes the change, so history and state cannot differ; a success writes none.
--
-- Whoever reads them as a stream goes by (txid, id) and only as far as the oldest transaction that was open when it looked:
-- below that nothing can appear any more, whereas ids are drawn long before they are committed. Such a place belongs to one
-- server's count of transactions, which a dump does not carry to another.
CREATE TABLE {schema}.cyclone_events (
    txid          xid8 NOT NULL DEFAULT pg_current_xact_id(),
    id            bigint NOT NULL DEFAULT nextval('{schema}.cyclone_ids'),
    at            timestamptz NOT NULL,
    kind          text COLLATE "C" NOT NULL,
    step          bigint,                       -- null, as the next columns, for what happened to a whole run
    run_id        bigint NOT NULL,
    node          text COLLATE "C",
    step_kind     text COLLATE "C",
    queue         text COLLATE "C",
    attempt       integer,
    detail        jsonb,
    actor         text,                         -- who asked for it; null when nobody did
    host          text,                         -- where that was, or where the worker is that had the step
    PRIMARY KEY (txid, id)
);
CREATE INDEX cyclone_events_run_id ON {schema}.cyclone_events (run_id);

-- rank is two per priority: work given back by a drain or a reclaim takes the lower one and goes first within its priority.
CREATE TABLE {schema}.cyclone_ready (
    lane          text COLLATE "C" NOT NULL,    -- queue, !queue (runs alone), or ?lane/kind/version (some worker did not know it)
    rank          smallint NOT NULL,
    ord           bigint NOT NULL,
    step          bigint NOT NULL,
    PRIMARY KEY (lane, rank, ord)
) WITH (autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 10000, autovacuum_vacuum_cost_delay = 0);

-- The lanes of kinds that not every worker knows. Claimers read this short list, so that such steps cost nobody a scan.
CREATE TABLE {schema}.cyclone_lanes (
    lane          text COLLATE "C" PRIMARY KEY,
    queue         text COLLATE "C" NOT NULL,
    kind          text COLLATE "C" NOT NULL,
    version       integer NOT NULL,
    created_at    timestamptz NOT NULL DEFAULT now()
);

CREATE TABLE {schema}.cyclone_claims (
    id            bigint PRIMARY KEY,
    life          bigint NOT NULL,
    steps         bigint[] NOT NULL,
    claimed_at    timestamptz NOT NULL DEFAULT now()
) WITH (autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 2000);
-- They go within seconds, and compressing them takes 1.5 µs a step.
ALTER TABLE {schema}.cyclone_claims ALTER COLUMN steps SET STORAGE EXTERNAL;
CREATE INDEX cyclone_claims_life ON {schema}.cyclone_claims (life);

CREATE TABLE {schema}.cyclone_lives (
    id            bigint PRIMARY KEY,
    host          text NOT NULL,
    pid           integer NOT NULL,
    queues        text[] NOT NULL,
    kinds         text[] NOT NULL,              -- kinds[i] with versions[i]: what this life can run
    versions      integer[] NOT NULL,
    started_at    timestamptz NOT NULL DEFAULT now(),
    lease_until   timestamptz NOT NULL,
    ended_at      timestamptz,                  -- a life that has ended is never revived
    end_reason    text,
    executing     bigint[],                     -- what it was executing when it died; null when nobody can tell
    CHECK ((ended_at IS NULL) = (end_reason IS NULL))
) WITH (fillfactor = 50);

CREATE TABLE {schema}.cyclone_kinds (
    kind          text COLLATE "C" NOT NULL,
    version       integer NOT NULL,
    action        boolean NOT NULL,
    max_attempts  integer NOT NULL,
    max_reclaims  integer,                      -- null: no limit
    timeout_s     double precision,
    queue         text NOT NULL,
    priority      smallint NOT NULL,
    registered_at timestamptz NOT NULL DEFAULT now(),
    PRIMARY KEY (kind, version)
);

-- Orders to a life: its lease thread reads them, within two seconds.
CREATE TABLE {schema}.cyclone_orders (
    id            bigint PRIMARY KEY DEFAULT nextval('{schema}.cyclone_ids'),
    life          bigint NOT NULL,
    step          bigint NOT NULL,
    claim         bigint NOT NULL,
    reason        text NOT NULL,
    ordered_at    timestamptz NOT NULL DEFAULT now()
);
CREATE INDEX cyclone_orders_life ON {schema}.cyclone_orders (life);

-- Who sleeps and wants to be notified. Unlogged: it is only ever a hint, and a sleeper writes it anew with every poll.
CREATE UNLOGGED TABLE {schema}.cyclone_sleepers (
    id            bigint PRIMARY KEY,
    until         timestamptz NOT NULL,
    notified_at   timestamptz NOT NULL DEFAULT '-infinity'
) WITH (fillfactor = 50);

-- Every run, whether it has a row of its own (a workflow) or is a standalone step.
CREATE VIEW {schema}.cyclone_all_runs AS
    SELECT id, 'workflow'::text AS type, workflow AS name, state, created_at, finished_at
    FROM {schema}.cyclone_runs
    UNION ALL
    SELECT run_id, 'step', kind,
           CASE state WHEN 'completed' THEN 'completed' WHEN 'discarded' THEN 'failed' WHEN 'cancelled' THEN 'cancelled'
                      ELSE 'running' END,
           enqueued_at, finished_at
    FROM {schema}.cyclone_steps WHERE id = run_id;

-- Stores one step for each input, and a ticket for each that is not to wait. A function rather than a statement, because its
-- plans stay with the session: a producer prepares nothing, so that it can go through a pooler, and planning the statement
-- anew each time took longer than running it (measured: see bench/README.md).
--
-- Ids are drawn and come back in the order of the inputs, as text with commas between. A fresh step's ticket carries the
-- step's own number. An empty id at the end says that somebody wants to be notified and was not within the last 10 ms, so
-- that a flood of submissions does not queue for the lock that NOTIFY holds through its commit. It is judged by the clock of
-- now: the transaction of a caller may have begun long ago. With `notify` the notification is part of the transaction, and
-- sleepers are only read, since a lock on one would last as long as that transaction. With null, for a call that is a
-- transaction of its own, the empty id is given to one of all that come at the same moment, and it owes the notification:
-- the others pass over the sleeper's row until that one has committed. If each that sees the sleeper asks on its own, of 32
-- clients in 4 processes every tenth call does (measured: 9 % more CPU of the clients; so 2 %, and of the server none).
--
-- The shape is that of the quickest call for one input (server CPU without the waits, least of 20 runs: 182 us; two inserts
-- by VALUES in a loop 181, but 110 us a step for many; one statement with modifying CTEs 254, as sets of functions in FROM
-- 217; a row with two columns in place of the text 30 more). For a thousand it costs what the CTEs do.
CREATE FUNCTION {schema}.cyclone_store(
    new_kind text, new_queue text, new_priority smallint, new_rank smallint, new_version integer, new_max_attempts integer,
    new_timeout_s float8, inputs text[], new_tags text[], new_metadata jsonb, keep_for_s float8,
    scheduled_at timestamptz, delay_s float8, channel text, notify boolean, test_now timestamptz
) RETURNS text LANGUAGE plpgsql AS $cyclone$
DECLARE
    at timestamptz := coalesce(test_now, now());
    due timestamptz := coalesce(scheduled_at, at + delay_s * interval '1 second');
    ids bigint[];
    told text;
    sleepers bigint[];
    moment timestamptz;
BEGIN
    IF due <= at THEN
        due := NULL;
    END IF;
    IF cardinality(inputs) = 1 THEN  -- without a query
        ids := ARRAY[nextval('{schema}.cyclone_ids')];
    ELSE
        ids := ARRAY(SELECT nextval('{schema}.cyclone_ids') FROM generate_series(1, cardinality(inputs)));
    END IF;
    INSERT INTO {schema}.cyclone_steps (
        id, run_id, ord, enqueued_at, ready_at, due_at, state, node, kind, queue, priority, version, max_attempts,
        timeout_s, input, tags, metadata, keep_for)
    SELECT s.id, s.id, CASE WHEN due IS NULL THEN s.id END, at, CASE WHEN due IS NULL THEN at END, due,
           CASE WHEN due IS NULL THEN 'available' ELSE 'scheduled' END,
           new_kind, new_kind, new_queue, new_priority, new_version, new_max_attempts, new_timeout_s,
           s.input::jsonb, new_tags, new_metadata, keep_for_s * interval '1 second'
    FROM (SELECT unnest(ids) AS id, unnest(inputs) AS input) s;
    told := array_to_string(ids, ',');
    IF due IS NULL THEN
        INSERT INTO {schema}.cyclone_ready (lane, rank, ord, step)
        SELECT new_queue, new_rank, s.id, s.id FROM (SELECT unnest(ids) AS id) s;
        moment := coalesce(test_now, clock_timestamp());
        IF EXISTS (SELECT FROM {schema}.cyclone_sleepers z
                   WHERE z.until > moment AND z.notified_at < moment - interval '10 milliseconds') THEN
            IF notify THEN
                PERFORM pg_notify(channel, '');
            ELSIF notify IS NULL THEN
                BEGIN
                    SELECT array_agg(z.id) INTO sleepers FROM (
                        SELECT z.id FROM {schema}.cyclone_sleepers z
                        WHERE z.until > moment AND z.notified_at < moment - interval '10 milliseconds'
                        FOR UPDATE SKIP LOCKED) z;
                    IF sleepers IS NOT NULL THEN
                        UPDATE {schema}.cyclone_sleepers z SET notified_at = moment WHERE z.id = ANY (sleepers);
                        told := told || ',';
                    END IF;
                EXCEPTION WHEN OTHERS THEN
                    NULL;  -- what is stored stays, and whoever sleeps will find it without this
                END;
            ELSE
                told := told || ',';
            END IF;
        END IF;
    END IF;
    RETURN told;
END $cyclone$;

-- As cyclone_store, for steps with unique keys: a key is held by one active step of its kind. One row for each input, in their
-- order: the step that has the key, and whether it is new. Two equal keys in one call keep the first.
--
-- The insert waits for whoever has taken or freed the key without having committed. When it inserts nothing, the next
-- statement reads with a fresh snapshot, and when that finds nobody the holder has ended in between: again. With `strict`
-- one duplicate undoes the others; that is done by an error that goes no further than the block, so that a caller's
-- transaction goes on. Keys are taken in their order, so that two such calls do not wait for each other.
CREATE FUNCTION {schema}.cyclone_store_unique(
    new_kind text, new_queue text, new_priority smallint, new_rank smallint, new_version integer, new_max_attempts integer,
    new_timeout_s float8, inputs text[], keys text[], strict boolean, new_tags text[], new_metadata jsonb,
    keep_for_s float8, scheduled_at timestamptz, delay_s float8, channel text, notify boolean, test_now timestamptz
) RETURNS TABLE (step text, created integer, asleep integer) LANGUAGE plpgsql AS $cyclone$
DECLARE
    at timestamptz := coalesce(test_now, now());
    due timestamptz := coalesce(scheduled_at, at + delay_s * interval '1 second');
    ids bigint[] := array_fill(NULL::bigint, ARRAY[cardinality(keys)]);
    news boolean[] := array_fill(false, ARRAY[cardinality(keys)]);
    one record;
    before text;
    held bigint;
    taken boolean := false;
    sleeping boolean := false;
    moment timestamptz;
BEGIN
    IF due <= at THEN
        due := NULL;
    END IF;
    BEGIN
        FOR one IN SELECT k.key, k.n FROM unnest(keys) WITH ORDINALITY AS k(key, n) ORDER BY k.key COLLATE "C", k.n LOOP
            IF one.key = before THEN  -- what stands before it has decided
                ids[one.n] := held;
                CONTINUE;
            END IF;
            before := one.key;
            LOOP
                held := nextval('{schema}.cyclone_ids');
                INSERT INTO {schema}.cyclone_steps (
                    id, run_id, ord, enqueued_at, ready_at, due_at, state, node, kind, queue, priority, version, max_attempts,
                    timeout_s, input, tags, metadata, keep_for, unique_key, key_held)
                VALUES (held, held, CASE WHEN due IS NULL THEN held END, at, CASE WHEN due IS NULL THEN at END, due,
                        CASE WHEN due IS NULL THEN 'available' ELSE 'scheduled' END, new_kind, new_kind, new_queue,
                        new_priority, new_version, new_max_attempts, new_timeout_s, inputs[one.n]::jsonb, new_tags,
                        new_metadata, keep_for_s * interval '1 second', one.key, true)
                ON CONFLICT (kind, unique_key) WHERE key_held DO NOTHING;
                IF FOUND THEN
                    news[one.n] := true;
                    IF due IS NULL THEN
                        INSERT INTO {schema}.cyclone_ready (lane, rank, ord, step) VALUES (new_queue, new_rank, held, held);
                    END IF;
                    EXIT;
                END IF;
                SELECT s.id INTO held FROM {schema}.cyclone_steps s
                WHERE s.kind = new_kind AND s.unique_key = one.key AND s.key_held;
                IF FOUND THEN
                    taken := true;
                    EXIT;
                END IF;
            END LOOP;
            ids[one.n] := held;
        END LOOP;
        IF strict AND taken AND true = ANY (news) THEN
            RAISE EXCEPTION USING ERRCODE = 'CY004', MESSAGE = 'a unique key is taken';
        END IF;
    EXCEPTION WHEN SQLSTATE 'CY004' THEN
        FOR i IN 1 .. cardinality(keys) LOOP  -- only the duplicates are told; what was new has never been
            IF news[i] THEN
                ids[i] := NULL;
                news[i] := false;
            END IF;
        END LOOP;
    END;
    IF due IS NULL AND true = ANY (news) THEN
        moment := coalesce(test_now, clock_timestamp());
        sleeping := EXISTS (SELECT FROM {schema}.cyclone_sleepers z
                            WHERE z.until > moment AND z.notified_at < moment - interval '10 milliseconds');
        IF sleeping AND notify THEN
            PERFORM pg_notify(channel, '');
        END IF;
    END IF;
    RETURN QUERY SELECT i.id::text, news[i.n]::integer, sleeping::integer
                 FROM unnest(ids) WITH ORDINALITY AS i(id, n) ORDER BY i.n;
END $cyclone$;
