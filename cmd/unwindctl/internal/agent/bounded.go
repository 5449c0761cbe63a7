package agent

import (
	"net"
	"slices"
	"sync"
	"time"
)

// The bounds on connections. A probe of the kubelet waits 5 s, and is accepted in that time even if
// all of the kernel's queue (net.core.somaxconn, 4096) is before it.
const (
	mostConnections = 256              // open at a time
	acceptEach      = time.Millisecond // so that they cost little of a processor
)

// bounded is a listener that accepts connections one at a time, and keeps at most mostConnections.
// For each one beyond that it closes the oldest, so a client that opens many idle connections does
// not lock out others.
type bounded struct {
	net.Listener
	mu   sync.Mutex
	open []*connection // the oldest first
}

// connection is a connection that a bounded listener has accepted.
type connection struct {
	net.Conn
	of *bounded
}

// Accept waits for the next connection.
func (b *bounded) Accept() (net.Conn, error) {
	time.Sleep(acceptEach)
	conn, err := b.Listener.Accept()
	if err != nil {
		return nil, err
	}
	c := &connection{conn, b}
	b.mu.Lock()
	b.open = append(b.open, c)
	var oldest *connection
	if len(b.open) > mostConnections {
		oldest = b.open[0]
	}
	b.mu.Unlock()
	if oldest != nil {
		_ = oldest.Close()
	}
	return c, nil
}

// Close closes the connection. It may be closed already.
func (c *connection) Close() error {
	c.of.mu.Lock()
	c.of.open = slices.DeleteFunc(c.of.open, func(o *connection) bool { return o == c })
	c.of.mu.Unlock()
	return c.Conn.Close()
}
