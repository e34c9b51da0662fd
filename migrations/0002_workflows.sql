-- What advances a run: functions, because each is several statements that must see one another's locks.
-- transaction: yes
--
-- A run advances by counting. Each node that is not a root has the number of its parents that have not ended, and each end
-- of a node takes one off its children, whatever end it was; at zero the child becomes available, or is cancelled when a
-- parent's end has decided so (its `fate`), which is an end again. Nodes without children are sinks; the run counts those
-- that are open, and ends with the last, in the same commit.
--
-- Locks are taken in one order: runs by id, then steps. Whoever only counts down takes no run's lock. Whatever can end a
-- run, or cancel a node, has the run's lock first; a caller that has not is told so (CY003) and comes again with it.
-- Each lock is a statement of its own and what is decided under it the next, which sees all that was committed until then.

-- A graph by its content. The newest of a name is what SQL and the command line submit: a worker that starts says so.
CREATE FUNCTION {schema}.cyclone_register(new_hash text, new_spec jsonb, newest boolean) RETURNS bigint
LANGUAGE plpgsql AS $cyclone$
DECLARE
    one bigint;
BEGIN
    INSERT INTO {schema}.cyclone_graphs (hash, workflow, version, queue, result, sinks, spec)
    SELECT new_hash, new_spec->>'workflow', (new_spec->>'version')::integer, new_spec->>'queue',
           new_spec->'nodes'->(new_spec->>'result')::integer->>'name',
           (SELECT count(*) FROM jsonb_array_elements(new_spec->'nodes') n WHERE (n->>'sink')::boolean), new_spec
    ON CONFLICT (hash) DO NOTHING RETURNING id INTO one;
    IF one IS NULL THEN
        SELECT id INTO one FROM {schema}.cyclone_graphs WHERE hash = new_hash;
        IF newest THEN
            UPDATE {schema}.cyclone_graphs g SET registered_at = clock_timestamp()
            WHERE g.id = one AND EXISTS (
                SELECT FROM {schema}.cyclone_graphs o WHERE o.workflow = g.workflow AND o.registered_at > g.registered_at);
        END IF;
        RETURN one;
    END IF;
    INSERT INTO {schema}.cyclone_graph_nodes (
        graph, pos, name, kind, version, max_attempts, timeout_s, queue, priority, default_queue, default_priority, tags,
        metadata, parents, children, map, max_parallel, policy, accept_skipped, contained, sink)
    SELECT one, n.pos - 1, d.name, d.kind, d.version, d.max_attempts, d.timeout_s, d.queue, d.priority, d.default_queue,
           d.default_priority, d.tags, nullif(d.metadata, 'null'::jsonb), cardinality(d.parents), d.children, d.map,
           d.max_parallel, d.policy, d.accept_skipped, d.contained, d.sink
    FROM jsonb_array_elements(new_spec->'nodes') WITH ORDINALITY AS n(node, pos),
         jsonb_to_record(n.node) AS d(
             name text, kind text, version integer, max_attempts integer, timeout_s float8, queue text, priority smallint,
             default_queue text, default_priority smallint, tags text[], metadata jsonb, parents integer[],
             children integer[], map boolean, max_parallel integer, policy smallint, accept_skipped boolean,
             contained boolean, sink boolean);
    RETURN one;
END $cyclone$;

-- The steps of new runs, all at once. Ids are drawn in the order of runs and nodes, so a parent's is below its children's.
CREATE FUNCTION {schema}.cyclone_insert_nodes(
    of_graph bigint, runs bigint[], new_queue text, new_priority smallint, at timestamptz, due timestamptz,
    deadline timestamptz
) RETURNS void LANGUAGE sql AS $cyclone$
    WITH drawn AS MATERIALIZED (
        SELECT o.*, nextval('{schema}.cyclone_ids') AS id FROM (
            SELECT r.run, r.n, g.* FROM unnest(runs) WITH ORDINALITY AS r(run, n)
            CROSS JOIN {schema}.cyclone_graph_nodes g WHERE g.graph = of_graph ORDER BY r.n, g.pos
        ) o
    ), known AS MATERIALIZED (
        SELECT run, array_agg(id ORDER BY pos) AS ids FROM drawn GROUP BY run
    ), stored AS (
        INSERT INTO {schema}.cyclone_steps (
            id, run_id, graph, pos, ord, enqueued_at, ready_at, due_at, deadline_at, state, pending, node, kind, version,
            queue, priority, max_attempts, timeout_s, tags, metadata, children, policy, accept_skipped, contained, sink)
        SELECT d.id, d.run, of_graph, d.pos,
               CASE WHEN d.parents = 0 AND due IS NULL THEN d.id END, at, CASE WHEN d.parents = 0 AND due IS NULL THEN at END,
               CASE WHEN d.parents = 0 THEN due END, deadline,
               CASE WHEN d.parents > 0 THEN 'pending' WHEN due IS NULL THEN 'available' ELSE 'scheduled' END,
               d.parents, d.name, CASE WHEN d.map THEN 'cyclone.map' ELSE d.kind END,
               CASE WHEN d.map THEN 1 ELSE d.version END,
               coalesce(d.queue, new_queue, g.queue, d.default_queue),
               coalesce(d.priority, new_priority, d.default_priority),
               CASE WHEN d.map THEN 5 ELSE d.max_attempts END, CASE WHEN NOT d.map THEN d.timeout_s END, d.tags, d.metadata,
               CASE WHEN NOT d.sink THEN (SELECT array_agg(k.ids[c + 1]) FROM unnest(d.children) AS c) END,
               d.policy, d.accept_skipped, d.contained, d.sink
        FROM drawn d JOIN known k ON k.run = d.run JOIN {schema}.cyclone_graphs g ON g.id = of_graph ORDER BY d.id
        RETURNING id, ord, queue, priority
    )
    INSERT INTO {schema}.cyclone_ready (lane, rank, ord, step)
    SELECT queue, priority * 2 + 1, ord, id FROM stored WHERE ord IS NOT NULL ORDER BY ord;
$cyclone$;

-- Submits a workflow once for each input: without keys always a new run, with keys at most one for each. Without any row the
-- graph is not known here: the caller registers it and comes again. One row for each input, in their order: the run, whether
-- this call made it, and the stored input of one that another call had made with another input.
--
-- With a key the insert comes first and waits for whoever holds the key without having committed; when it inserts nothing,
-- the next statement reads with a fresh snapshot (one statement for both would miss a row that was committed while it
-- waited), and when that finds nothing the holder has been purged in between: again. Under REPEATABLE READ the insert raises
-- 40001 instead, as it must. Keys are taken in their order, so that two such calls do not wait for each other.
CREATE FUNCTION {schema}.cyclone_submit_runs(
    new_hash text, keys text[], inputs text[], new_queue text, new_priority smallint, new_tags text[], new_metadata jsonb,
    keep_for_s float8, scheduled_at timestamptz, delay_s float8, deadline_s float8, deadline_at timestamptz,
    channel text, notify boolean, test_now timestamptz
) RETURNS TABLE (run_id text, created integer, differs text, asleep integer) LANGUAGE plpgsql AS $cyclone$
#variable_conflict use_column
DECLARE
    g {schema}.cyclone_graphs;
    at timestamptz := coalesce(test_now, now());
    due timestamptz := coalesce(scheduled_at, at + delay_s * interval '1 second');
    deadline timestamptz := coalesce(deadline_at, at + deadline_s * interval '1 second');
    made bigint[];
    ids bigint[] := '{}';
    news boolean[] := '{}';
    others text[] := '{}';
    turn bigint;
    one bigint;
    same boolean;
    other text;
    moment timestamptz;
    sleeping boolean := false;
BEGIN
    SELECT * INTO g FROM {schema}.cyclone_graphs WHERE hash = new_hash;
    IF NOT FOUND THEN
        RETURN;
    END IF;
    IF due <= at THEN
        due := NULL;
    END IF;
    IF keys IS NULL THEN
        WITH sent AS MATERIALIZED (
            SELECT nextval('{schema}.cyclone_ids') AS id, i.input, i.n FROM unnest(inputs) WITH ORDINALITY AS i(input, n)
        ), stored AS (
            INSERT INTO {schema}.cyclone_runs (
                id, graph, workflow, created_at, deadline_at, due_at, keep_for, open_sinks, result_node, input, tags, metadata)
            SELECT s.id, g.id, g.workflow, at, deadline, deadline, keep_for_s * interval '1 second', g.sinks, g.result,
                   s.input::jsonb, new_tags, new_metadata FROM sent s ORDER BY s.n
        )
        SELECT array_agg(s.id ORDER BY s.n) INTO made FROM sent s;
        ids := made;
    ELSE
        ids := array_fill(NULL::bigint, ARRAY[cardinality(keys)]);
        news := array_fill(false, ARRAY[cardinality(keys)]);
        others := array_fill(NULL::text, ARRAY[cardinality(keys)]);
        made := '{}';
        FOR turn IN SELECT k.n FROM unnest(keys) WITH ORDINALITY AS k(key, n) ORDER BY k.key COLLATE "C", k.n LOOP
            LOOP
                INSERT INTO {schema}.cyclone_runs (
                    id, graph, workflow, submit_key, created_at, deadline_at, due_at, keep_for, open_sinks, result_node, input,
                    tags, metadata)
                VALUES (nextval('{schema}.cyclone_ids'), g.id, g.workflow, keys[turn], at, deadline, deadline,
                        keep_for_s * interval '1 second', g.sinks, g.result, inputs[turn]::jsonb, new_tags, new_metadata)
                ON CONFLICT (workflow, submit_key) WHERE submit_key IS NOT NULL DO NOTHING
                RETURNING id INTO one;
                IF FOUND THEN
                    made := made || one;
                    news[turn] := true;
                    EXIT;
                END IF;
                SELECT r.id, r.input = inputs[turn]::jsonb, r.input::text INTO one, same, other
                FROM {schema}.cyclone_runs r WHERE r.workflow = g.workflow AND r.submit_key = keys[turn];
                IF FOUND THEN
                    others[turn] := CASE WHEN NOT same THEN other END;
                    EXIT;
                END IF;
            END LOOP;
            ids[turn] := one;
        END LOOP;
    END IF;
    IF made <> '{}' THEN
        PERFORM {schema}.cyclone_insert_nodes(g.id, made, new_queue, new_priority, at, due, deadline);
        IF due IS NULL THEN
            moment := coalesce(test_now, clock_timestamp());
            sleeping := EXISTS (SELECT FROM {schema}.cyclone_sleepers z
                                WHERE z.until > moment AND z.notified_at < moment - interval '10 milliseconds');
            IF sleeping AND notify THEN
                PERFORM pg_notify(channel, '');
            END IF;
        END IF;
    END IF;
    RETURN QUERY SELECT i.id::text, coalesce(news[i.n], keys IS NULL)::integer, others[i.n], sleeping::integer
                 FROM unnest(ids) WITH ORDINALITY AS i(id, n) ORDER BY i.n;
END $cyclone$;

-- Ends up to `most` live steps of a run that is being ended early; whoever calls has nothing of it locked but the run.
-- With the last of them the ending is over. Returns how many it ended.
CREATE FUNCTION {schema}.cyclone_end_steps(run bigint, most integer, at timestamptz) RETURNS integer
LANGUAGE plpgsql
SET enable_nestloop = off SET enable_mergejoin = off AS $cyclone$
DECLARE
    how text;
    why text;
    live bigint[];
BEGIN
    SELECT r.ending, coalesce(r.error, r.ending) INTO how, why FROM {schema}.cyclone_runs r WHERE r.id = run FOR UPDATE;
    IF how IS NULL THEN
        RETURN 0;
    END IF;
    WITH held AS (
        SELECT id FROM {schema}.cyclone_steps
        WHERE run_id = run AND state IN ('pending', 'scheduled', 'available', 'running', 'waiting')
        ORDER BY id LIMIT most FOR UPDATE
    )
    SELECT coalesce(array_agg(id), '{}') INTO live FROM held;
    -- A statement later: the claims of steps that were claimed while their lock was waited for can be seen now.
    WITH old AS MATERIALIZED (
        SELECT s.id, s.state, c.life FROM {schema}.cyclone_steps s LEFT JOIN {schema}.cyclone_claims c ON c.id = s.claim
        WHERE s.id = ANY(live)
    ), ended AS (
        UPDATE {schema}.cyclone_steps s
        SET state = 'cancelled', finished_at = at, due_at = NULL, error_kind = 'cancelled', fate = how,
            error = CASE how WHEN 'cancel' THEN why WHEN 'deadline' THEN 'the deadline of the run has passed'
                             ELSE 'the run has failed' END,
            resume = s.resume OR s.state = 'running'
        FROM old WHERE s.id = old.id AND s.id = ANY(live)
        RETURNING s.id, s.run_id, s.node, s.kind, s.queue, s.attempts, s.claim, s.error, old.state AS was, old.life
    ), ordered AS (
        INSERT INTO {schema}.cyclone_orders (life, step, claim, reason, ordered_at)
        SELECT life, id, claim, error, at FROM ended WHERE was = 'running' AND life IS NOT NULL
    )
    INSERT INTO {schema}.cyclone_events (at, kind, step, run_id, node, step_kind, queue, attempt, detail)
    SELECT at, 'cancelled', id, run_id, node, kind, queue, attempts, jsonb_build_object('reason', error)
    FROM ended WHERE was IN ('running', 'scheduled');
    IF cardinality(live) < most THEN
        UPDATE {schema}.cyclone_runs r SET ending = NULL WHERE r.id = run;
    END IF;
    RETURN cardinality(live);
END $cyclone$;

-- Ends a run before its time. The run is locked. The fact commits with whatever decided it; what is left of the run is ended
-- in rounds, the first of them at once. False when it had ended already.
CREATE FUNCTION {schema}.cyclone_end_run(
    run bigint, how text, at_node text, kind text, message text, new_actor text, new_host text, at timestamptz
) RETURNS boolean LANGUAGE plpgsql AS $cyclone$
BEGIN
    UPDATE {schema}.cyclone_runs r
    SET state = CASE how WHEN 'cancel' THEN 'cancelled' ELSE 'failed' END, finished_at = at, early_at = at, due_at = NULL,
        ending = how, error_node = at_node, error_kind = kind, error = message
    WHERE r.id = run AND r.state = 'running';
    IF NOT FOUND THEN
        RETURN false;
    END IF;
    INSERT INTO {schema}.cyclone_events (at, kind, run_id, node, actor, host, detail)
    VALUES (at, CASE how WHEN 'cancel' THEN 'run_cancelled' ELSE 'run_failed' END, run, at_node, new_actor, new_host,
            jsonb_strip_nulls(jsonb_build_object('error_kind', kind, 'error', left(message, 1000))));
    PERFORM {schema}.cyclone_end_steps(run, 1000, at);
    RETURN true;
END $cyclone$;

-- Counts down the children of steps that have ended, and whatever ends by that, level by level. `hits` are the children, one
-- for each parent that ended; `classes` say how it ended: 0 well, 1 failed, 2 skipped. `sinks` are the runs of what ended
-- without children, one for each. Returns how many steps became available.
CREATE FUNCTION {schema}.cyclone_advance(
    hits bigint[], classes integer[], sinks bigint[], locked bigint[], at timestamptz
) RETURNS integer LANGUAGE plpgsql
SET enable_nestloop = off SET enable_mergejoin = off AS $cyclone$
DECLARE
    made integer := 0;
    now_made integer;
    more_sinks bigint[];
    cancelled bigint[];
    losing bigint[];
    maps bigint[];
    one bigint;
BEGIN
    WHILE hits <> '{}' LOOP
        -- Taken in their order, and only then looked at: no two that count down the same children wait for each other.
        WITH hit AS MATERIALIZED (
            SELECT h.child, count(*)::integer AS n, bool_or(h.class = 1) AS failed, bool_or(h.class = 2) AS skipped
            FROM unnest(hits, classes) AS h(child, class) GROUP BY h.child
        ), held AS MATERIALIZED (
            SELECT s.id, s.pending, s.state, s.fate, s.policy, s.accept_skipped FROM {schema}.cyclone_steps s
            WHERE s.id = ANY(hits) ORDER BY s.id FOR UPDATE
        ), judged AS MATERIALIZED (
            SELECT h.id, h.state, h.pending - hit.n AS pending,
                   CASE WHEN h.fate = 'dependency' OR hit.failed AND (h.state = 'waiting' OR h.policy = 1) THEN 'dependency'
                        WHEN h.fate IS NOT NULL OR hit.skipped AND NOT h.accept_skipped THEN 'skipped' END AS fate
            FROM held h JOIN hit ON hit.child = h.id WHERE h.state IN ('pending', 'waiting')
        ), moved AS (
            UPDATE {schema}.cyclone_steps s
            SET pending = j.pending, fate = j.fate,
                state = CASE WHEN j.pending > 0 THEN s.state WHEN j.fate IS NOT NULL THEN 'cancelled'
                             WHEN j.state = 'waiting' THEN 'completed' ELSE 'available' END,
                ord = CASE WHEN j.pending = 0 AND j.fate IS NULL AND j.state = 'pending'
                           THEN nextval('{schema}.cyclone_ids') ELSE s.ord END,
                ready_at = CASE WHEN j.pending = 0 THEN at ELSE s.ready_at END,
                finished_at = CASE WHEN j.pending = 0 AND (j.fate IS NOT NULL OR j.state = 'waiting') THEN at END,
                error_kind = CASE WHEN j.pending = 0 AND j.fate IS NOT NULL THEN 'cancelled' ELSE s.error_kind END,
                error = CASE WHEN j.pending > 0 OR j.fate IS NULL THEN s.error WHEN j.fate = 'skipped' THEN 'skipped'
                             WHEN j.state = 'waiting' THEN 'an item failed' ELSE 'a node that it depends on failed' END
            FROM judged j WHERE s.id = j.id AND s.id = ANY(hits) AND s.state IN ('pending', 'waiting')
            RETURNING s.id, s.run_id, s.node, s.kind, s.queue, s.isolated, s.priority, s.ord, s.state, s.fate, s.children, s.sink,
                      s.map_step, s.map_next, s.attempts
        ), tickets AS (
            INSERT INTO {schema}.cyclone_ready (lane, rank, ord, step)
            SELECT CASE WHEN isolated THEN '!' || queue ELSE queue END, priority * 2 + 1, ord, id
            FROM moved WHERE state = 'available' ORDER BY id
        ), ends AS (
            SELECT m.*, CASE m.fate WHEN 'dependency' THEN 1 WHEN 'skipped' THEN 2 ELSE 0 END AS class
            FROM moved m WHERE m.state IN ('completed', 'cancelled')
        ), events AS (
            INSERT INTO {schema}.cyclone_events (at, kind, step, run_id, node, step_kind, queue, attempt, detail)
            SELECT at, 'cancelled', id, run_id, node, kind, queue, attempts, jsonb_build_object('reason', fate)
            FROM ends WHERE state = 'cancelled'
        ), next AS (
            SELECT array_agg(c) AS hits, array_agg(e.class) AS classes FROM ends e, unnest(e.children) AS c
        )
        SELECT coalesce(next.hits, '{}'), coalesce(next.classes, '{}'),
               (SELECT count(*) FROM moved WHERE state = 'available'),
               ARRAY(SELECT e.run_id FROM ends e WHERE e.sink AND e.map_step IS NULL),
               ARRAY(SELECT e.run_id FROM ends e WHERE e.state = 'cancelled'),
               ARRAY(SELECT e.id FROM ends e WHERE e.class = 1),
               ARRAY(SELECT m.id FROM moved m WHERE m.state = 'waiting' AND m.map_next IS NOT NULL)
        INTO hits, classes, now_made, more_sinks, cancelled, losing, maps FROM next;
        made := made + now_made;
        sinks := sinks || more_sinks;
        IF NOT cancelled <@ locked THEN
            RAISE EXCEPTION USING ERRCODE = 'CY003', MESSAGE = 'a node is cancelled, and its run is not locked';
        END IF;
        IF losing <> '{}' THEN
            UPDATE {schema}.cyclone_runs r SET lost = true FROM {schema}.cyclone_steps s
            WHERE s.id = ANY(losing) AND r.id = s.run_id AND r.result_node = s.node
              AND r.id = ANY (ARRAY(SELECT run_id FROM {schema}.cyclone_steps WHERE id = ANY(losing)));
        END IF;
        FOREACH one IN ARRAY maps LOOP  -- with max_parallel: as many items begin as are missing
            made := made + {schema}.cyclone_let_items(one, at);
        END LOOP;
    END LOOP;
    IF sinks <> '{}' THEN
        IF NOT sinks <@ locked THEN
            RAISE EXCEPTION USING ERRCODE = 'CY003', MESSAGE = 'a run may end, and is not locked';
        END IF;
        WITH ended AS (
            UPDATE {schema}.cyclone_runs r
            SET open_sinks = r.open_sinks - d.n,
                state = CASE WHEN r.open_sinks > d.n THEN r.state WHEN r.lost THEN 'failed' ELSE 'completed' END,
                finished_at = CASE WHEN r.open_sinks <= d.n THEN at END,
                early_at = CASE WHEN r.open_sinks <= d.n AND r.lost THEN at END,
                due_at = CASE WHEN r.open_sinks > d.n THEN r.due_at END
            FROM (SELECT run, count(*)::integer AS n FROM unnest(sinks) AS run GROUP BY run) d
            WHERE r.id = d.run AND r.id = ANY(sinks) AND r.state = 'running'
            RETURNING r.id, r.state, r.error_node, r.error_kind, r.error
        )
        INSERT INTO {schema}.cyclone_events (at, kind, run_id, node, detail)
        SELECT at, 'run_failed', id, error_node,
               jsonb_strip_nulls(jsonb_build_object('error_kind', error_kind, 'error', left(error, 1000)))
        FROM ended WHERE state = 'failed';
    END IF;
    RETURN made;
END $cyclone$;

-- Lets items of a map with max_parallel go until so many are live. The map is locked.
CREATE FUNCTION {schema}.cyclone_let_items(of_map bigint, at timestamptz) RETURNS integer LANGUAGE plpgsql AS $cyclone$
DECLARE
    room integer;
    after bigint;
    last bigint;
    n integer;
BEGIN
    SELECT s.map_next, (SELECT g.max_parallel FROM {schema}.cyclone_graph_nodes g WHERE g.graph = s.graph AND g.pos = s.pos) - (
               SELECT count(*) FROM {schema}.cyclone_steps i
               WHERE i.map_step = of_map AND i.id <= s.map_next AND i.state NOT IN ('completed', 'discarded', 'cancelled'))
    INTO after, room
    FROM {schema}.cyclone_steps s WHERE s.id = of_map;
    IF coalesce(room, 0) <= 0 THEN
        RETURN 0;
    END IF;
    WITH next AS MATERIALIZED (
        SELECT id FROM {schema}.cyclone_steps WHERE map_step = of_map AND id > after AND state = 'pending'
        ORDER BY id LIMIT room FOR UPDATE
    ), moved AS (
        UPDATE {schema}.cyclone_steps s SET state = 'available', ord = nextval('{schema}.cyclone_ids'), ready_at = at
        FROM next WHERE s.id = next.id AND s.id = ANY (ARRAY(SELECT id FROM next))
        RETURNING s.id, s.queue, s.priority, s.ord
    ), tickets AS (
        INSERT INTO {schema}.cyclone_ready (lane, rank, ord, step) SELECT queue, priority * 2 + 1, ord, id FROM moved ORDER BY id
    )
    SELECT max(id), count(*) INTO last, n FROM moved;
    IF n > 0 THEN
        UPDATE {schema}.cyclone_steps s SET map_next = last WHERE s.id = of_map;
    END IF;
    RETURN n;
END $cyclone$;

-- Completes nodes of runs, each fenced by its claim, and advances their runs. `runs` are those to lock: of the nodes whose
-- end may end their run. Returns the exceptions, as complete_steps does, in a row with how many steps became available.
--
-- With `step_over` it waits for nobody: what somebody has locked, a node, its run or a child of it, is left out. The claim rows
-- that are `closed` go along, so that a batch of nodes is one statement: in a pipeline the locks of a join that many workers
-- count down would be held while a worker that has no processor just then gets round to sending the end of it.
CREATE FUNCTION {schema}.cyclone_complete_nodes(
    ids bigint[], claims bigint[], outputs text[], closed bigint[], runs bigint[], step_over boolean, test_now timestamptz
) RETURNS TABLE (made integer, id bigint, state text, claim bigint) LANGUAGE plpgsql
SET enable_nestloop = off SET enable_mergejoin = off AS $cyclone$
#variable_conflict use_column
DECLARE
    at timestamptz := coalesce(test_now, clock_timestamp());
    free bigint[] := ids;
    done bigint[];
    hits bigint[];
    sinks bigint[];
    ready integer;
BEGIN
    IF closed <> '{}' THEN
        DELETE FROM {schema}.cyclone_claims c WHERE c.id = ANY (ARRAY(
            SELECT o.id FROM {schema}.cyclone_claims o WHERE o.id = ANY(closed) FOR UPDATE SKIP LOCKED));
    END IF;
    IF step_over THEN
        PERFORM set_config('lock_timeout', '100ms', true);
        free := {schema}.cyclone_free_nodes(ids, runs);
    ELSIF runs <> '{}' THEN
        PERFORM FROM {schema}.cyclone_runs r WHERE r.id = ANY(runs) ORDER BY r.id FOR UPDATE;
    END IF;
    WITH sent AS MATERIALIZED (
        SELECT * FROM unnest(ids, claims, outputs) AS d(id, claim, output)
    ), done AS (
        UPDATE {schema}.cyclone_steps s
        SET state = 'completed', output = d.output::jsonb, finished_at = at, error_kind = NULL, error = NULL
        FROM sent d
        WHERE s.id = d.id AND s.id = ANY(free) AND s.claim = d.claim AND s.state = 'running'
        RETURNING s.id, s.run_id, s.children, s.sink, s.map_step
    )
    SELECT ARRAY(SELECT d.id FROM done d), ARRAY(SELECT c FROM done d, unnest(d.children) AS c),
           ARRAY(SELECT d.run_id FROM done d WHERE d.sink AND d.map_step IS NULL)
    INTO done, hits, sinks;
    ready := {schema}.cyclone_advance(hits, array_fill(0, ARRAY[cardinality(hits)]), sinks, runs, at);
    RETURN QUERY SELECT ready, NULL::bigint, NULL::text, NULL::bigint;
    IF cardinality(done) < cardinality(ids) THEN
        RETURN QUERY
        SELECT ready, d.id, s.state, s.claim
        FROM (SELECT unnest(ids) AS id EXCEPT SELECT unnest(done)) d
        LEFT JOIN {schema}.cyclone_steps s ON s.id = d.id AND s.id = ANY(ids);
    END IF;
END $cyclone$;

-- Which of these nodes nobody else has locked, nor their run where it is among `runs`, nor any of their children. What is
-- free is locked from here on.
CREATE FUNCTION {schema}.cyclone_free_nodes(ids bigint[], runs bigint[]) RETURNS bigint[]
LANGUAGE plpgsql AS $cyclone$
DECLARE
    held_runs bigint[] := '{}';
    own bigint[];
    kids bigint[];
BEGIN
    IF runs <> '{}' THEN
        WITH held AS (SELECT id FROM {schema}.cyclone_runs WHERE id = ANY(runs) ORDER BY id FOR UPDATE SKIP LOCKED)
        SELECT ARRAY(SELECT id FROM held) INTO held_runs;
    END IF;
    WITH held AS (
        SELECT id, run_id FROM {schema}.cyclone_steps WHERE id = ANY(ids) ORDER BY id FOR UPDATE SKIP LOCKED)
    SELECT ARRAY(SELECT id FROM held WHERE run_id = ANY(held_runs) OR NOT run_id = ANY(runs)) INTO own;
    WITH held AS (
        SELECT id FROM {schema}.cyclone_steps WHERE id = ANY (ARRAY(
            SELECT c FROM {schema}.cyclone_steps s, unnest(s.children) AS c WHERE s.id = ANY(own)))
        ORDER BY id FOR UPDATE SKIP LOCKED)
    SELECT ARRAY(SELECT id FROM held) INTO kids;
    RETURN ARRAY(SELECT s.id FROM {schema}.cyclone_steps s
                 WHERE s.id = ANY(own) AND coalesce(s.children, '{}') <@ kids);
END $cyclone$;

-- Completes one step in whatever transaction is open; with the id of its run if it is a node. False: the fence refused.
--
-- With a seal it ends a completion transaction, and is sent in one message with its COMMIT. A refusal must undo what the handler
-- wrote, and the COMMIT is already behind this call: so the server itself raises. The seal shows whether the handler ended the
-- transaction. A function rather than a statement, because its plans stay with the session without the driver's preparing
-- anything.
CREATE FUNCTION {schema}.cyclone_complete(
    step bigint, own_claim bigint, run bigint, new_output text, test_now timestamptz, seal text
) RETURNS boolean LANGUAGE plpgsql AS $cyclone$
BEGIN
    IF seal IS NOT NULL THEN
        IF current_setting('cyclone.seal', true) IS DISTINCT FROM seal THEN
            RAISE EXCEPTION USING ERRCODE = 'CY002', MESSAGE = 'the handler ended its completion transaction';
        END IF;
        -- A step that somebody has locked holds up the completion this long, and no longer.
        PERFORM set_config('lock_timeout', '10s', true);
    END IF;
    IF run IS NULL THEN
        UPDATE {schema}.cyclone_steps
        SET state = 'completed', output = new_output::jsonb, finished_at = coalesce(test_now, clock_timestamp()),
            error_kind = NULL, error = NULL, key_held = false
        WHERE id = step AND claim = own_claim AND state = 'running';
        IF FOUND THEN
            RETURN true;
        END IF;
    ELSE
        PERFORM FROM {schema}.cyclone_complete_nodes(
            ARRAY[step], ARRAY[own_claim], ARRAY[new_output], '{}', ARRAY[run], false, test_now) c WHERE c.id IS NOT NULL;
        IF NOT FOUND THEN
            RETURN true;
        END IF;
    END IF;
    IF seal IS NOT NULL THEN
        RAISE EXCEPTION USING ERRCODE = 'CY001', MESSAGE = 'the lease of this step was lost';
    END IF;
    RETURN false;
END $cyclone$;

-- What the end of nodes that have just been discarded or cancelled means for their runs, which are locked: a failure that the
-- graph contains is counted down to those that depend on it, any other fails the run.
CREATE FUNCTION {schema}.cyclone_nodes_failed(failed bigint[], locked bigint[], new_host text, at timestamptz) RETURNS integer
LANGUAGE plpgsql AS $cyclone$
DECLARE
    hits bigint[];
    sinks bigint[];
    one record;
    made integer;
BEGIN
    -- The first failure stays with the run: should the result be lost by it, it says why.
    UPDATE {schema}.cyclone_runs r
    SET error_node = f.node, error_kind = f.error_kind, error = f.error, lost = r.lost OR r.result_node = f.node
    FROM (SELECT DISTINCT ON (run_id) * FROM {schema}.cyclone_steps WHERE id = ANY(failed) AND contained ORDER BY run_id, id) f
    WHERE r.id = f.run_id AND r.id = ANY (ARRAY(SELECT run_id FROM {schema}.cyclone_steps WHERE id = ANY(failed)))
      AND r.state = 'running';
    SELECT ARRAY(SELECT c FROM {schema}.cyclone_steps s, unnest(s.children) AS c WHERE s.id = ANY(failed) AND s.contained),
           ARRAY(SELECT s.run_id FROM {schema}.cyclone_steps s
                 WHERE s.id = ANY(failed) AND s.contained AND s.sink AND s.map_step IS NULL)
    INTO hits, sinks;
    made := {schema}.cyclone_advance(hits, array_fill(1, ARRAY[cardinality(hits)]), sinks, locked, at);
    FOR one IN SELECT DISTINCT ON (run_id) run_id, node, error_kind, error FROM {schema}.cyclone_steps
               WHERE id = ANY(failed) AND NOT contained ORDER BY run_id, finished_at, id LOOP
        PERFORM {schema}.cyclone_end_run(
            one.run_id, 'failure', one.node, one.error_kind, one.error, NULL, new_host, at);
    END LOOP;
    RETURN made;
END $cyclone$;

-- Ends nodes otherwise than well, each fenced by its claim: `discard` with its failure, `skip` (its condition does not hold),
-- `cancel_run` (the handler cancels the whole run). Answers like cyclone_complete_nodes.
CREATE FUNCTION {schema}.cyclone_fail_nodes(
    ids bigint[], claims bigint[], verbs text[], kinds text[], messages text[], tracebacks text[], called boolean[],
    runs bigint[], new_host text, step_over boolean, test_now timestamptz
) RETURNS TABLE (made integer, id bigint, state text, claim bigint) LANGUAGE plpgsql
SET enable_nestloop = off SET enable_mergejoin = off AS $cyclone$
#variable_conflict use_column
DECLARE
    at timestamptz := coalesce(test_now, clock_timestamp());
    free bigint[] := ids;
    done bigint[];
    failed bigint[];
    hits bigint[];
    sinks bigint[];
    ready integer := 0;
    one record;
BEGIN
    PERFORM set_config('lock_timeout', '100ms', true);
    IF step_over THEN
        free := {schema}.cyclone_free_nodes(ids, runs);
    ELSE
        PERFORM FROM {schema}.cyclone_runs r WHERE r.id = ANY(runs) ORDER BY r.id FOR UPDATE;
    END IF;
    WITH sent AS MATERIALIZED (
        SELECT * FROM unnest(ids, claims, verbs, kinds, messages, tracebacks, called)
               AS d(id, claim, verb, error_kind, message, traceback, called)
    ), done AS (
        UPDATE {schema}.cyclone_steps s
        SET state = CASE d.verb WHEN 'discard' THEN 'discarded' ELSE 'cancelled' END, finished_at = at,
            attempts = s.attempts - CASE WHEN d.called OR s.resume THEN 0 ELSE 1 END,
            fate = CASE d.verb WHEN 'skip' THEN 'skipped' WHEN 'cancel_run' THEN 'cancel' ELSE s.fate END,
            error_kind = CASE d.verb WHEN 'discard' THEN d.error_kind ELSE 'cancelled' END,
            error = CASE d.verb WHEN 'skip' THEN 'skipped' ELSE d.message END
        FROM sent d
        WHERE s.id = d.id AND s.id = ANY(free) AND s.claim = d.claim AND s.state = 'running'
        RETURNING s.id, s.run_id, s.node, s.kind, s.queue, s.attempts, s.children, s.sink, s.map_step, s.fate,
                  d.verb, d.error_kind, d.message, d.traceback
    ), failures AS (
        INSERT INTO {schema}.cyclone_errors (step, attempt, at, kind, message, traceback)
        SELECT id, attempts, at, error_kind, message, traceback FROM done WHERE verb = 'discard'
    ), events AS (
        INSERT INTO {schema}.cyclone_events (at, kind, step, run_id, node, step_kind, queue, attempt, host, detail)
        SELECT at, CASE verb WHEN 'discard' THEN 'discarded' ELSE 'cancelled' END, id, run_id, node, kind, queue, attempts,
               new_host, jsonb_strip_nulls(jsonb_build_object(
                   'error_kind', error_kind, 'error', CASE verb WHEN 'discard' THEN left(message, 1000) END,
                   'reason', CASE verb WHEN 'skip' THEN 'skipped' WHEN 'cancel_run' THEN message END))
        FROM done
    )
    SELECT ARRAY(SELECT d.id FROM done d), ARRAY(SELECT d.id FROM done d WHERE verb = 'discard'),
           ARRAY(SELECT c FROM done d, unnest(d.children) AS c WHERE verb = 'skip'),
           ARRAY(SELECT d.run_id FROM done d WHERE verb = 'skip' AND d.sink AND d.map_step IS NULL)
    INTO done, failed, hits, sinks;
    FOR one IN SELECT DISTINCT ON (s.run_id) s.run_id, s.node, s.error FROM unnest(ids, verbs) AS d(id, verb)
               JOIN {schema}.cyclone_steps s ON s.id = d.id
               WHERE d.verb = 'cancel_run' AND s.id = ANY(done) ORDER BY s.run_id, s.id LOOP
        PERFORM {schema}.cyclone_end_run(one.run_id, 'cancel', one.node, 'cancelled', one.error, NULL, new_host, at);
    END LOOP;
    ready := {schema}.cyclone_advance(hits, array_fill(2, ARRAY[cardinality(hits)]), sinks, runs, at)
           + {schema}.cyclone_nodes_failed(failed, runs, new_host, at);
    RETURN QUERY SELECT ready, NULL::bigint, NULL::text, NULL::bigint;
    RETURN QUERY
    SELECT ready, d.id, s.state, s.claim
    FROM (SELECT unnest(ids) AS id EXCEPT SELECT unnest(done)) d
    LEFT JOIN {schema}.cyclone_steps s ON s.id = d.id AND s.id = ANY(ids);
END $cyclone$;

-- A map has its list: one step for each item, the map itself waits for them. Items keep the order of the list by their ids.
-- Refused, with zero made and the map as it is, when the fence does not hold or the run has ended.
CREATE FUNCTION {schema}.cyclone_expand_map(
    step bigint, own_claim bigint, run bigint, items jsonb, test_now timestamptz
) RETURNS TABLE (made integer, id bigint, state text, claim bigint) LANGUAGE plpgsql
SET enable_nestloop = on AS $cyclone$
#variable_conflict use_column
DECLARE
    at timestamptz := coalesce(test_now, clock_timestamp());
    m {schema}.cyclone_steps;
    g {schema}.cyclone_graph_nodes;
    total integer := jsonb_array_length(items);
    ready integer := 0;
    last bigint;
BEGIN
    PERFORM set_config('lock_timeout', '100ms', true);
    PERFORM FROM {schema}.cyclone_runs r WHERE r.id = run FOR UPDATE;
    SELECT s.* INTO m FROM {schema}.cyclone_steps s JOIN {schema}.cyclone_runs r ON r.id = s.run_id
    WHERE s.id = step AND s.claim = own_claim AND s.state = 'running' AND r.state = 'running' FOR UPDATE OF s;
    IF NOT FOUND THEN
        RETURN QUERY SELECT 0, step, s.state, s.claim FROM {schema}.cyclone_steps s WHERE s.id = step;
        RETURN;
    END IF;
    SELECT * INTO g FROM {schema}.cyclone_graph_nodes n WHERE n.graph = m.graph AND n.pos = m.pos;
    WITH drawn AS MATERIALIZED (
        SELECT nextval('{schema}.cyclone_ids') AS id, i.item, i.n FROM jsonb_array_elements(items) WITH ORDINALITY AS i(item, n)
    ), stored AS (
        INSERT INTO {schema}.cyclone_steps (
            id, run_id, graph, pos, ord, enqueued_at, ready_at, deadline_at, state, pending, node, kind, version, queue, priority,
            max_attempts, timeout_s, tags, metadata, input, children, contained, sink, map_step)
        SELECT d.id, m.run_id, m.graph, m.pos, CASE WHEN d.n <= coalesce(g.max_parallel, d.n) THEN d.id END, at, at,
               m.deadline_at, CASE WHEN d.n <= coalesce(g.max_parallel, d.n) THEN 'available' ELSE 'pending' END, 0,
               format('%s[%s]', m.node, d.n - 1), g.kind, g.version, m.queue, m.priority, g.max_attempts, g.timeout_s, g.tags,
               g.metadata, d.item, ARRAY[m.id], m.contained, m.sink, m.id
        FROM drawn d ORDER BY d.n
        RETURNING id, ord, queue, priority
    ), tickets AS (
        INSERT INTO {schema}.cyclone_ready (lane, rank, ord, step)
        SELECT s.queue, s.priority * 2 + 1, s.ord, s.id FROM stored s WHERE s.ord IS NOT NULL ORDER BY s.ord
    )
    SELECT count(s.ord), max(s.id) FILTER (WHERE s.ord IS NOT NULL) INTO ready, last FROM stored s;
    UPDATE {schema}.cyclone_steps s
    SET state = CASE total WHEN 0 THEN 'completed' ELSE 'waiting' END, pending = total,
        map_next = CASE WHEN g.max_parallel IS NOT NULL THEN last END,
        finished_at = CASE total WHEN 0 THEN at END, error_kind = NULL, error = NULL
    WHERE s.id = step;
    IF total = 0 THEN
        ready := {schema}.cyclone_advance(
            coalesce(m.children, '{}'), array_fill(0, ARRAY[coalesce(cardinality(m.children), 0)]),
            CASE WHEN m.sink THEN ARRAY[m.run_id] ELSE '{}' END, ARRAY[m.run_id], at);
    END IF;
    RETURN QUERY SELECT ready, NULL::bigint, NULL::text, NULL::bigint;
END $cyclone$;

-- For triggers, psql and other languages: the same rules and the same errors as of the library, by SQLSTATE: CY010 an unknown
-- name, CY011 a bad key, CY012 a conflict (with the id of the run that has the key in its DETAIL). Names are looked up among
-- what pools have registered, the graph and the options are the newest. Whoever sleeps is notified by the same transaction.

-- The channel of this schema's notifications, as the library makes it.
CREATE FUNCTION {schema}.cyclone_channel() RETURNS text LANGUAGE sql STABLE AS $cyclone$
    SELECT CASE WHEN octet_length('cyclone:' || n.nspname) <= 63 THEN 'cyclone:' || n.nspname
                ELSE 'cyclone:' || left(encode(sha256(convert_to(n.nspname, 'UTF8')), 'hex'), 32) END
    FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace WHERE c.oid = '{schema}.cyclone_ids'::regclass;
$cyclone$;

CREATE FUNCTION {schema}.cyclone_check_key(key text) RETURNS void LANGUAGE plpgsql IMMUTABLE AS $cyclone$
BEGIN
    IF octet_length(convert_to(key, 'UTF8')) NOT BETWEEN 1 AND 256 THEN
        RAISE EXCEPTION USING ERRCODE = 'CY011', MESSAGE = 'a key has 1 to 256 bytes';
    END IF;
END $cyclone$;

CREATE FUNCTION {schema}.cyclone_newest(
    workflow_name text, OUT hash text, OUT deadline_s float8, OUT keep_for_s float8
) LANGUAGE plpgsql STABLE AS $cyclone$
BEGIN
    SELECT g.hash, (g.spec->>'deadline_s')::float8, (g.spec->>'keep_for_s')::float8 INTO hash, deadline_s, keep_for_s FROM {schema}.cyclone_graphs g WHERE g.workflow = workflow_name
    ORDER BY g.registered_at DESC, g.id DESC LIMIT 1;
    IF hash IS NULL THEN
        RAISE EXCEPTION USING ERRCODE = 'CY010', MESSAGE = format('no pool has registered a workflow %L', workflow_name),
            HINT = 'Start one, or run: cyclone migrate register TARGET';
    END IF;
END $cyclone$;

-- The id of a new run.
CREATE FUNCTION {schema}.cyclone_submit(
    workflow text, input jsonb, queue text DEFAULT NULL, priority integer DEFAULT NULL, tags text[] DEFAULT NULL,
    metadata jsonb DEFAULT NULL, keep_for interval DEFAULT NULL, scheduled_at timestamptz DEFAULT NULL,
    delay interval DEFAULT NULL, deadline interval DEFAULT NULL
) RETURNS bigint LANGUAGE sql AS $cyclone$
    SELECT s.run_id::bigint FROM {schema}.cyclone_newest($1) g, {schema}.cyclone_submit_runs(
        g.hash, NULL, ARRAY[coalesce($2, 'null')::text], $3, $4::smallint, $5, $6,
        coalesce(extract(epoch FROM $7)::float8, g.keep_for_s), $8, extract(epoch FROM $9)::float8,
        coalesce(extract(epoch FROM $10)::float8, g.deadline_s), NULL, {schema}.cyclone_channel(), true, NULL) s;
$cyclone$;

-- The run that has the key, and whether this call made it.
CREATE FUNCTION {schema}.cyclone_submit_once(
    workflow text, key text, input jsonb, queue text DEFAULT NULL, priority integer DEFAULT NULL, tags text[] DEFAULT NULL,
    metadata jsonb DEFAULT NULL, keep_for interval DEFAULT NULL, scheduled_at timestamptz DEFAULT NULL,
    delay interval DEFAULT NULL, deadline interval DEFAULT NULL, OUT run_id bigint, OUT created boolean
) LANGUAGE plpgsql AS $cyclone$
#variable_conflict use_variable
DECLARE
    one record;
BEGIN
    PERFORM {schema}.cyclone_check_key(key);
    SELECT s.* INTO one FROM {schema}.cyclone_newest(workflow) g, {schema}.cyclone_submit_runs(
        g.hash, ARRAY[key], ARRAY[coalesce(input, 'null')::text], queue, priority::smallint, tags, metadata,
        coalesce(extract(epoch FROM keep_for)::float8, g.keep_for_s), scheduled_at, extract(epoch FROM delay)::float8,
        coalesce(extract(epoch FROM deadline)::float8, g.deadline_s), NULL, {schema}.cyclone_channel(), true, NULL) s;
    IF one.differs IS NOT NULL THEN
        RAISE EXCEPTION USING ERRCODE = 'CY012', DETAIL = one.run_id,
            MESSAGE = format('run %s of %L has the key %L already, and another input', one.run_id, workflow, key);
    END IF;
    run_id := one.run_id::bigint;
    created := one.created = 1;
END $cyclone$;

-- The id of a new step; with `unique_key` that of the active step that has it, and a conflict unless it is new.
CREATE FUNCTION {schema}.cyclone_enqueue(
    step text, input jsonb DEFAULT NULL, unique_key text DEFAULT NULL, max_attempts integer DEFAULT NULL,
    queue text DEFAULT NULL, priority integer DEFAULT NULL, tags text[] DEFAULT NULL, metadata jsonb DEFAULT NULL,
    keep_for interval DEFAULT NULL, scheduled_at timestamptz DEFAULT NULL, delay interval DEFAULT NULL
) RETURNS bigint LANGUAGE plpgsql AS $cyclone$
DECLARE
    k {schema}.cyclone_kinds;
    one record;
    rank smallint;
BEGIN
    SELECT * INTO k FROM {schema}.cyclone_kinds n WHERE n.kind = step ORDER BY n.version DESC LIMIT 1;
    IF NOT FOUND THEN
        RAISE EXCEPTION USING ERRCODE = 'CY010', MESSAGE = format('no pool has registered a step %L', step),
            HINT = 'Start one, or run: cyclone migrate register TARGET';
    END IF;
    k.queue := coalesce(queue, k.queue);
    k.priority := coalesce(priority, k.priority);
    k.max_attempts := coalesce(max_attempts, k.max_attempts);
    rank := k.priority * 2 + 1;
    IF unique_key IS NULL THEN
        RETURN {schema}.cyclone_store(
            step, k.queue, k.priority, rank, k.version, k.max_attempts, k.timeout_s,
            ARRAY[coalesce(input, 'null')::text], tags, metadata, extract(epoch FROM keep_for)::float8, scheduled_at,
            extract(epoch FROM delay)::float8, {schema}.cyclone_channel(), true, NULL)::bigint;
    END IF;
    PERFORM {schema}.cyclone_check_key(unique_key);
    SELECT s.step, s.created INTO one FROM {schema}.cyclone_store_unique(
        step, k.queue, k.priority, rank, k.version, k.max_attempts, k.timeout_s, ARRAY[coalesce(input, 'null')::text],
        ARRAY[unique_key], true, tags, metadata, extract(epoch FROM keep_for)::float8, scheduled_at,
        extract(epoch FROM delay)::float8, {schema}.cyclone_channel(), true, NULL) s;
    IF one.created = 0 THEN
        RAISE EXCEPTION USING ERRCODE = 'CY012', DETAIL = one.step,
            MESSAGE = format('an active run (%s) of %L already holds the key %L', one.step, step, unique_key);
    END IF;
    RETURN one.step::bigint;
END $cyclone$;
