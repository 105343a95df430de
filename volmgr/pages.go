// SPDX-License-Identifier: Apache-2.0

package volmgr

import (
	"context"
	"encoding/base64"
	"fmt"
	"iter"
	"strings"

	"google.golang.org/protobuf/proto"

	"weft.dev/weft/proto/parts"
	"weft.dev/weft/volmgr/cluster"
)

// pageBytes is the size of the entries at which an answer ends. The last entry may exceed
// it: the message still has room for it.
const pageBytes = parts.MaxMessage / 2

// asked is a request for a page.
type asked interface {
	GetPageSize() uint32
	GetPageToken() string
}

// keyed returns the entries of a list that come after a key, in the order of their keys.
type keyed[T any] func(s *cluster.State, after string) (iter.Seq2[string, T], error)

// page returns one page of a list and the token of the next one. A token holds the list's
// name and the key of the last entry. The next page begins after that key, even if entries
// were added or removed meanwhile.
func page[T any, P proto.Message](ctx context.Context, m *Manager, list string, r asked, entries keyed[T], convert func(T) P) (page []P, next string, err error) {
	after, err := parseToken(list, r.GetPageToken())
	if err != nil {
		return nil, "", toStatus(err)
	}
	state, err := m.read(ctx)
	if err != nil {
		return nil, "", toStatus(err)
	}
	all, err := entries(state, after)
	if err != nil {
		return nil, "", toStatus(err)
	}
	last, bytes := "", 0
	for key, value := range all {
		if bytes >= pageBytes || r.GetPageSize() > 0 && len(page) == int(r.GetPageSize()) {
			return page, token(list, last), nil
		}
		message := convert(value)
		page, last, bytes = append(page, message), key, bytes+proto.Size(message)
	}
	return page, "", nil
}

func token(list, key string) string {
	return base64.RawURLEncoding.EncodeToString([]byte(list + "\n" + key))
}

// parseToken returns the key in a token; an empty token gives the empty key, which is before
// all others.
func parseToken(list, token string) (key string, err error) {
	if token == "" {
		return "", nil
	}
	text, err := base64.RawURLEncoding.DecodeString(token)
	of, key, ok := strings.Cut(string(text), "\n")
	if err != nil || !ok || of != list {
		return "", &cluster.Error{Kind: cluster.InvalidArgument, Field: "page_token",
			Text: fmt.Sprintf("page_token: %.40q is not the next_page_token of a list of %s", token, list)}
	}
	return key, nil
}
