"""The loop that moves bytes between connected peers: a state machine over arrays and sockets.

It is written in the part of Python that numba compiles, so that it runs in a thread without ever
taking the interpreter's lock; where numba isn't installed, the same source runs as it stands
(`system_calls.py` has the system calls of both). All that it knows is in arrays that Python made:

    links   a row a connection       what is being sent there, what is being received
    puts    a row a put's piece      whence, how much is left, how urgent; the most urgent is next
    landed  (links, notifications)   written when a put's last byte by this connection has landed
    values  (peers, notifications)   the least of them, over the connections of a peer
    waits   a row a waiting thread   what it sleeps for, and what wakes it
    marks   a row a moment           what was sent or arrived, and when; the newest, or none

    frame   | magic | offset | bytes | notification or -1 | value | bytes …

A put travels in frames of a limited size, and between two frames the choice is free: a more urgent
put overtakes. Only a put's last frame carries its notification, and a stream keeps its order, so
that the data are there before.

A peer may have several connections, one behind another in `links`. Whichever has room takes the
next frame of a put; once all are taken, every connection carries the notification behind what it
took, and it counts when all have brought it. A small put goes by one connection, always the same
for a notification, so that such puts land in their order.
"""

from __future__ import annotations

from paceline.comm.transport.system_calls import (
    address,
    clock_gettime,
    errno,
    jit,
    lock,
    poll,
    read,
    recv,
    sendmsg,
    setsockopt,
    unlock,
    write,
)

# The columns of a link, a put and a wait, and the places in `state`.
FD, ALIVE, ERROR, FULL, PUT, OUT_HAVE, OUT_LEFT, OUT_AT = range(8)
IN_HAVE, IN_LEFT, IN_AT, IN_WAKE, OF_PEER, FIRST, BEHIND, LINK = range(8, 16)
STATUS, TO, PRIORITY, ORDER, AT, LEFT, OFFSET, NOTE, VALUE, REST, ONLY, TOLD, BUSY, PUTS = range(14)
ASLEEP, PEER, EVENT, WAIT = range(4)
CONTROL, MEMORY, SIZE, CHUNK, TOP, EVENTS, LOCK, GONE, SUBSCRIBED, MARKED, ENDS, STATE = range(12)
WHAT, OF, NOTIFICATION, REACHED, SECONDS, NANOSECONDS, MARK = range(7)

LEFT_HERE, ARRIVED = range(2)  # what a mark tells of
FREE, WAITING, NEW, QUEUED, SENT = range(5)  # a piece's status; the loop sets the last two
NONE = -1  # instead of a put: there is none
ANY = -1  # instead of the number of a peer's only connection for a put
WORD = 8  # bytes
HEAD_WORDS = 5
HEAD = HEAD_WORDS * WORD
MAGIC = 0x50_61_63_65
STOP = -1  # on the control pipe, instead of a put
EVERYBODY = -1  # is woken, or is waited for, instead of one peer
ENDED, NONSENSE = -1, -2  # errors of a link that the system has no number for

_IN, _OUT, _BAD = 0x1, 0x4, 0x8 | 0x10 | 0x20  # poll(2)
_FLAGS = 0x40 | 0x4000  # MSG_DONTWAIT, MSG_NOSIGNAL
_INTERRUPTED, _AGAIN = 4, 11  # errno(3)
_WAIT_SLICE_MS = 500
_SOL_SOCKET, _SO_RCVLOWAT = 1, 18  # socket(7)
_ENOUGH = 2**17  # bytes that the loop wakes for, of a long frame
_MONOTONIC = 1  # clock_gettime(2)


@jit
def wake(peer, events, waits, one):  # type: ignore[no-untyped-def]
    """Wake who sleeps for a peer, and, of news, who sleeps for everybody's; under the lock."""
    for w in range(waits.shape[0]):
        who = waits[w, PEER]
        if waits[w, ASLEEP] and (peer == EVERYBODY or who == peer or (events and who == EVERYBODY)):
            waits[w, ASLEEP] = 0
            write(waits[w, EVENT], address(one), WORD)


@jit
def mark(what, peer, note, value, state, marks):  # type: ignore[no-untyped-def]
    """Write down what happens now, where somebody wants to know; the oldest is forgotten."""
    if marks.shape[0] == 0:
        return
    row = marks[state[MARKED] % marks.shape[0]]
    row[WHAT], row[OF], row[NOTIFICATION], row[REACHED] = what, peer, note, value
    clock_gettime(_MONOTONIC, address(row) + SECONDS * WORD)
    state[MARKED] += 1


@jit
def has_work(put, number):  # type: ignore[no-untyped-def]
    """Tell whether there is a frame of a put's piece for its peer's connection of a number."""
    mine = put[ONLY] == ANY or put[ONLY] == number
    if put[LEFT] > 0 and mine:
        return True
    return put[REST] == NONE and not (put[TOLD] >> number) & 1


@jit
def most_urgent(link, number, state, puts):  # type: ignore[no-untyped-def]
    """Return the put that goes next by a connection; -1: none waits."""
    best = -1
    for p in range(state[TOP]):
        if puts[p, STATUS] != QUEUED or puts[p, TO] != link[OF_PEER]:
            continue
        if not has_work(puts[p], number):
            continue
        sooner = puts[p, PRIORITY] - puts[best, PRIORITY] if best >= 0 else -1
        if sooner < 0 or (sooner == 0 and puts[p, ORDER] < puts[best, ORDER]):
            best = p
    return best


@jit
def begin_frame(p, link, number, head, state, puts):  # type: ignore[no-untyped-def]
    """Cut the next frame off a put, or only notify where its others go by other connections."""
    put = puts[p]
    size = min(state[CHUNK], put[LEFT]) if put[ONLY] == ANY or put[ONLY] == number else 0
    head[0], head[1], head[2], head[3], head[4] = MAGIC, put[OFFSET], size, -1, put[VALUE]
    link[PUT], link[OUT_HAVE], link[OUT_LEFT], link[OUT_AT] = p, 0, size, put[AT]
    put[AT] += size
    put[OFFSET] += size
    put[LEFT] -= size
    put[BUSY] += 1
    rest = put[REST]
    if rest == NONE:
        if put[LEFT] == 0 or size == 0:
            head[3] = put[NOTE]
            put[TOLD] |= 1 << number
    elif put[LEFT] == 0:
        puts[rest, OFFSET] = put[OFFSET]
        puts[rest, STATUS] = QUEUED
        state[TOP] = max(state[TOP], rest + 1)


@jit
def end_frame(link, state, puts, waits, one, marks):  # type: ignore[no-untyped-def]
    """See whether a put, or a piece of it, has left whole with a frame."""
    p = link[PUT]
    put, connections = puts[p], link[BEHIND] - link[FIRST]
    link[PUT] = NONE
    put[BUSY] -= 1
    last = put[REST] == NONE
    if put[LEFT] > 0 or put[BUSY] > 0 or (last and put[TOLD] != (1 << connections) - 1):
        return
    if last:
        mark(LEFT_HERE, link[OF_PEER], put[NOTE], put[VALUE], state, marks)
    lock(state[LOCK])
    put[STATUS] = SENT
    state[GONE] += 1
    if last:
        wake(link[OF_PEER], False, waits, one)
    unlock(state[LOCK])


@jit
def send(i, state, links, puts, heads, message, waits, one, marks):  # type: ignore[no-untyped-def]
    """Send until the socket is full or nothing is left; return 0, or an error."""
    link, head = links[i], heads[i]
    number = i - link[FIRST]
    while True:
        if link[PUT] == NONE:
            p = most_urgent(link, number, state, puts)
            if p < 0:
                link[FULL] = 0
                return 0
            begin_frame(p, link, number, head, state, puts)
        message[8], message[9] = address(head) + link[OUT_HAVE], HEAD - link[OUT_HAVE]
        message[10], message[11] = link[OUT_AT], link[OUT_LEFT]
        asked = message[9] + message[11]
        sent = sendmsg(link[FD], address(message), _FLAGS)
        if sent < 0:
            error = errno()
            if error == _INTERRUPTED:
                continue
            link[FULL] = 1
            return 0 if error == _AGAIN else error
        of_head = min(sent, HEAD - link[OUT_HAVE])
        link[OUT_HAVE] += of_head
        link[OUT_AT] += sent - of_head
        link[OUT_LEFT] -= sent - of_head
        if link[OUT_HAVE] == HEAD and link[OUT_LEFT] == 0:
            end_frame(link, state, puts, waits, one, marks)
        if sent < asked:
            link[FULL] = 1
            return 0


@jit
def open_frame(link, head, state, notifications):  # type: ignore[no-untyped-def]
    """Look at a complete head; return 0, or an error."""
    offset, size, note = head[1], head[2], head[3]
    if head[0] != MAGIC or size < 0 or size > state[CHUNK] or offset < 0:
        return NONSENSE
    if offset > state[SIZE] - size or note < -1 or note >= notifications:
        return NONSENSE
    link[IN_AT], link[IN_LEFT] = state[MEMORY] + offset, size
    return 0


@jit
def notify(i, head, state, links, landed, values, waits, one, marks):  # type: ignore[no-untyped-def]
    """Tell what a frame notifies, if it does, and all connections of its peer have brought it."""
    note, value, peer = head[3], head[4], links[i, OF_PEER]
    if note < 0:
        return
    landed[i, note] = value
    for other in range(links[i, FIRST], links[i, BEHIND]):
        value = min(value, landed[other, note])
    if value == values[peer, note]:
        return
    mark(ARRIVED, peer, note, value, state, marks)
    lock(state[LOCK])
    values[peer, note] = value
    events = note < state[SUBSCRIBED]
    state[EVENTS] += events
    wake(peer, events, waits, one)
    unlock(state[LOCK])


@jit
def sleep_until(link, word):  # type: ignore[no-untyped-def]
    """Let the kernel wake the loop for what is worth it: a head, or a good part of a frame."""
    enough = 1
    if link[IN_HAVE] == HEAD and link[IN_LEFT] > 0:
        enough = min(link[IN_LEFT], _ENOUGH)
    if link[IN_WAKE] != enough:
        link[IN_WAKE] = word[0] = enough
        setsockopt(link[FD], _SOL_SOCKET, _SO_RCVLOWAT, address(word), 4)


@jit
def receive(i, state, links, heads, word, landed, values, waits, one, marks):  # type: ignore[no-untyped-def]
    """Receive what is there; return 0, or an error."""
    link, head = links[i], heads[i]
    while True:
        in_head = link[IN_HAVE] < HEAD
        at, size = link[IN_AT], link[IN_LEFT]
        if in_head:
            at, size = address(head) + link[IN_HAVE], HEAD - link[IN_HAVE]
        got = recv(link[FD], at, size, _FLAGS)
        if got == 0:
            return ENDED
        if got < 0:
            error = errno()
            if error == _INTERRUPTED:
                continue
            if error != _AGAIN:
                return error
            sleep_until(link, word)
            return 0
        if in_head:
            link[IN_HAVE] += got
            if link[IN_HAVE] < HEAD:
                continue
            error = open_frame(link, head, state, values.shape[1])
            if error != 0:
                return error
        else:
            link[IN_AT] += got
            link[IN_LEFT] -= got
        if link[IN_LEFT] == 0:
            link[IN_HAVE] = 0
            notify(i, head, state, links, landed, values, waits, one, marks)
        if got < size:
            sleep_until(link, word)
            return 0


@jit
def take(state, puts, inbox):  # type: ignore[no-untyped-def]
    """Queue the puts whose rows Python has filled; return False if it wants the loop to end."""
    got = read(state[CONTROL], address(inbox), WORD * inbox.shape[0])
    for word in range(got // WORD):
        p = inbox[word]
        if p == STOP:
            return False
        puts[p, STATUS] = QUEUED
        state[TOP] = max(state[TOP], p + 1)
    return True


@jit
def give_up(i, error, state, links, waits, one):  # type: ignore[no-untyped-def]
    """End a connection, and, if it didn't just end, its peer's others; wake everybody."""
    lock(state[LOCK])
    first, behind = (i, i + 1) if error == ENDED else (links[i, FIRST], links[i, BEHIND])
    for other in range(first, behind):
        if links[other, ALIVE]:
            links[other, ERROR], links[other, ALIVE] = error, 0
            state[ENDS] += 1
    wake(EVERYBODY, True, waits, one)
    unlock(state[LOCK])


@jit
def run(  # type: ignore[no-untyped-def]
    state, links, puts, landed, values, waits, heads, polled, message, inbox, word, one, marks
):
    """Move bytes until Python says stop."""
    message[2], message[3] = address(message) + 8 * WORD, 2  # msghdr: two parts, at message[8]
    count = links.shape[0]
    while True:
        shared = False
        for i in range(count):
            polled[i, 0] = links[i, FD] if links[i, ALIVE] else -1
            polled[i, 1] = _IN | _OUT if links[i, FULL] else _IN
        polled[count, 0], polled[count, 1] = state[CONTROL], _IN
        poll(address(polled), count + 1, _WAIT_SLICE_MS)
        told = (polled[count, 1] >> 16) & _IN
        if told and not take(state, puts, inbox):
            return
        for i in range(count):
            events, error = polled[i, 1] >> 16, 0
            if links[i, ALIVE] and events & (_IN | _BAD):
                error = receive(i, state, links, heads[0], word, landed, values, waits, one, marks)
            if links[i, ALIVE] and error == 0 and (events & _OUT or (told and not links[i, FULL])):
                error = send(i, state, links, puts, heads[1], message, waits, one, marks)
                shared |= links[i, BEHIND] - links[i, FIRST] > 1
            if error != 0:
                give_up(i, error, state, links, waits, one)
        for i in range(count if shared else 0):  # what one has taken, the others notify of
            if links[i, ALIVE] and not links[i, FULL]:
                error = send(i, state, links, puts, heads[1], message, waits, one, marks)
                if error != 0:
                    give_up(i, error, state, links, waits, one)
