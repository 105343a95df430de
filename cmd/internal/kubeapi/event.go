// SPDX-License-Identifier: Apache-2.0

package kubeapi

import (
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"net/url"
	"strings"
	"time"

	"weft.dev/weft/csi"
)

// eventObject is an Event of API v1.
type eventObject struct {
	APIVersion     string    `json:"apiVersion"`
	Kind           string    `json:"kind"`
	Metadata       metadata  `json:"metadata"`
	InvolvedObject reference `json:"involvedObject"`
	Type           string    `json:"type"`
	Reason         string    `json:"reason"`
	Message        string    `json:"message"`
	Source         source    `json:"source"`
	First          time.Time `json:"firstTimestamp"`
	Last           time.Time `json:"lastTimestamp"`
	Count          int       `json:"count"`
}

type metadata struct {
	Name      string `json:"name"`
	Namespace string `json:"namespace"`
}

type reference struct {
	APIVersion string `json:"apiVersion"`
	Kind       string `json:"kind"`
	Namespace  string `json:"namespace"`
	Name       string `json:"name"`
	UID        string `json:"uid,omitempty"` // kubectl describe searches by it
}

type source struct {
	Component string `json:"component"`
}

// messageSize is the API server's limit for a message, in bytes.
const messageSize = 1024

// PostClaimEvent creates an event of a PersistentVolumeClaim. An existing event of this name was
// made by another driver, or by this one, and is no error.
func (c *Client) PostClaimEvent(ctx context.Context, e csi.ClaimEvent) error {
	severity := "Normal"
	if e.Warning {
		severity = "Warning"
	}
	err := c.post(ctx, reference{"v1", "PersistentVolumeClaim", e.Namespace, e.Claim, e.UID}, e.Name, severity, e.Reason, e.Message, e.Time)
	if err != nil {
		return fmt.Errorf("post event %s of claim %s/%s: %w", e.Reason, e.Namespace, e.Claim, err)
	}
	return nil
}

// post creates an event of an object, in its namespace, unless there is one of this name.
func (c *Client) post(ctx context.Context, of reference, name, severity, reason, message string, at time.Time) error {
	at = at.UTC().Truncate(time.Second) // the API server's precision
	body, err := json.Marshal(eventObject{
		APIVersion: "v1", Kind: "Event", Metadata: metadata{name, of.Namespace}, InvolvedObject: of,
		Type: severity, Reason: reason, Message: strings.ToValidUTF8(message[:min(len(message), messageSize)], ""),
		Source: source{csi.DriverName}, First: at, Last: at, Count: 1,
	})
	if err == nil {
		err = c.call(ctx, http.MethodPost, "/api/v1/namespaces/"+url.PathEscape(of.Namespace)+"/events", body, nil)
	}
	if refusedWith(err, http.StatusConflict) {
		return nil
	}
	return err
}
